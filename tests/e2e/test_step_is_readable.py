"""One training step, from prompts to new weights, is short enough to be read at a sitting.

A plain GRPO step is traced while it runs, and the statements are counted that it executes.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import pytest

import caldera
from caldera.engine import Engine
from caldera.rollout import Rollout
from caldera.trainer.main_ppo import main
from caldera.trainer.ppo.trainer import PPOTrainer

if TYPE_CHECKING:
    from tests.conftest import Lab

PACKAGE = Path(caldera.__file__).parent
PHASES = ("rollout", "score", "evaluate", "advantage", "update")
MOST_ON_THE_WAY = 300
"""Statements of `step`, its phases, and all functions through which they reach an engine or a
sampler."""
MOST_OF_THE_CONTROLLER = 450
"""The same with everything else that trainer, workers and their groups execute in the step."""


class StepTrace:
    """What a step executes of the package, but for what engine and sampler do when called."""

    def __init__(self) -> None:
        self.lines: dict[CodeType, set[int]] = defaultdict(set)
        self._step = PPOTrainer.step.__code__
        self.on_the_way: set[CodeType] = {self._step}
        self.on_the_way |= {getattr(PPOTrainer, phase).__code__ for phase in PHASES}
        self.reached: set[str] = set()
        self._ends = set(_methods(Engine)) | set(_methods(Rollout))

    def run(self, step: Callable[[], Any]) -> Any:
        sys.settrace(self._enter)
        try:
            return step()
        finally:
            sys.settrace(None)
            sys.setprofile(None)

    def statements(self, among: set[CodeType] | None = None) -> Counter[str]:
        """How many statements of each file were executed."""
        counts: Counter[str] = Counter()
        for code, lines in self.lines.items():
            if among is None or code in among:
                places = _statements_of(code.co_filename)
                counts[code.co_filename] += len({places[line] for line in lines if line in places})
        return counts

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)):
            return None
        if code in self._ends:
            self._leave_out(frame)
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.lines[frame.f_code].add(frame.f_lineno)
        return self._line

    def _leave_out(self, end: FrameType) -> None:
        """Trace nothing until this call of an engine or a sampler returns."""
        self.reached.add(end.f_code.co_name)
        caller = end.f_back
        while caller is not None and caller.f_code is not self._step:
            self.on_the_way.add(caller.f_code)
            caller = caller.f_back

        def resume(frame: FrameType, event: str, arg: Any) -> None:
            if frame is end and event == "return":
                sys.setprofile(None)
                sys.settrace(self._enter)

        sys.settrace(None)
        sys.setprofile(resume)


def _methods(kind: type[Any]) -> Iterator[CodeType]:
    """The code of all methods of a class and its subclasses."""
    for value in vars(kind).values():
        function = getattr(value, "fget", None) or getattr(value, "__wrapped__", value)
        if hasattr(function, "__code__"):
            yield function.__code__
    for derived in kind.__subclasses__():
        yield from _methods(derived)


@cache
def _statements_of(file: str) -> dict[int, int]:
    """Each line of code -> the line at which its statement begins; headers of blocks without what
    is in them, and without definitions and docstrings."""
    places = {}
    for node in ast.walk(ast.parse(Path(file).read_text())):
        is_definition = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
        if not isinstance(node, ast.stmt) or is_definition:
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else (node.end_lineno or node.lineno)
        for line in range(node.lineno, max(node.lineno, last) + 1):
            places[line] = node.lineno
    return places


@pytest.fixture
def trace(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepTrace:
    """Of the second step of a GRPO run, in which nothing happens for the first time."""
    step, found = PPOTrainer.step, StepTrace()

    def traced(self: PPOTrainer, rows: Any) -> Any:
        plain = partial(step, self, rows)
        return found.run(plain) if self.global_steps == 2 else plain()

    monkeypatch.setattr(PPOTrainer, "step", traced)
    assert main(lab.overrides(tmp_path, "trainer.total_training_steps=2")) == 0
    return found


def test_a_plain_step_is_read_at_a_sitting(trace: StepTrace) -> None:
    assert {"generate", "infer", "train"} <= trace.reached
    on_the_way = trace.statements(trace.on_the_way)
    assert 50 < on_the_way.total() < MOST_ON_THE_WAY, on_the_way
    executed = trace.statements()
    rooms = tuple(str(PACKAGE / room) for room in ("trainer", "workers", "single_controller"))
    controller = {file: count for file, count in executed.items() if file.startswith(rooms)}
    assert sum(controller.values()) < MOST_OF_THE_CONTROLLER, controller
