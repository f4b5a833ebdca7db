"""Where the metrics of a step go."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeAlias

from caldera.errors import DataError
from caldera.registry import Registry
from caldera.tracking.console import format_number, print_line
from caldera.tracking.dumps import json_line, read_jsonl, write_jsonl_atomic

__all__ = ["LOGGERS", "ConsoleLogger", "FileLogger", "Generation", "LoggedRun", "Logger"]

Generation: TypeAlias = tuple[str, str, float]
"""(input, output, score) of a validation answer."""
GENERATION_COLUMNS = ("step", "input", "output", "score")
GENERATIONS = "val/generations"
"""What back ends call the table of validation answers."""


class Logger(Protocol):
    """Receives the metrics of every step, and the answers that are shown of a validation."""

    def log(self, data: dict[str, float], step: int) -> None: ...

    def log_generations(self, samples: Sequence[Generation], step: int) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class LoggedRun:
    """What a logger may know about the run that it logs."""

    project_name: str
    experiment_name: str
    config: dict[str, Any] | None
    """The resolved configuration, for loggers that keep it with the metrics."""
    run_dir: Path
    resume_step: int
    """The step of the checkpoint that the run goes on from; 0 for a run from the start."""


LOGGERS: Registry[Callable[[LoggedRun], Logger]] = Registry("trainer.logger")


@LOGGERS.register("console")
class ConsoleLogger:
    """One line a step: `step:3 - actor/entropy:0.6931 - ...`."""

    def __init__(self, run: LoggedRun) -> None:
        pass

    def log(self, data: dict[str, float], step: int) -> None:
        values = (f"{name}:{format_number(value)}" for name, value in data.items())
        print_line(" - ".join([f"step:{step}", *values]))

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        for prompt, output, score in samples:
            print_line(f"[validation, step {step}, score {score:g}] {prompt}\n{output}")

    def finish(self) -> None:
        pass


@LOGGERS.register("file")
class FileLogger:
    """One line of JSON a row, `{"step": N, "data": {...}}`, on disk as soon as it is logged.

    Validation answers go into NAME.generations.jsonl beside it, one a line.
    """

    def __init__(self, run: LoggedRun) -> None:
        path = _metrics_path(run)
        _rewind(path, run.resume_step)
        self._generations = path.with_suffix(".generations.jsonl")
        if self._generations.exists():
            _rewind(self._generations, run.resume_step)
        self._file = _open_to_append(path)

    def log(self, data: dict[str, float], step: int) -> None:
        self._file.write(json_line({"step": step, "data": data}))
        self._file.flush()

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        with _open_to_append(self._generations) as file:
            for sample in samples:
                file.write(json_line(dict(zip(GENERATION_COLUMNS, (step, *sample), strict=True))))

    def finish(self) -> None:
        self._file.close()


def _open_to_append(path: Path) -> TextIO:
    # A lone surrogate in a decoded answer is no UTF-8; its backslash form is valid JSON.
    return path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")


def _metrics_path(run: LoggedRun) -> Path:
    if path := os.environ.get("VERL_FILE_LOGGER_PATH"):
        return Path(path)
    if root := os.environ.get("VERL_FILE_LOGGER_ROOT"):
        return Path(root) / run.project_name / f"{run.experiment_name}.jsonl"
    return run.run_dir / "metrics.jsonl"


def _rewind(path: Path, resume_step: int) -> None:
    """Drop what the resumed run logs again.

    A run from the start logs its validation of step 0 again too, so nothing stays of the old file.
    """
    rows = read_jsonl(path) if resume_step > 0 and path.exists() else []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("step"), int):
            raise DataError(f"{path}: line {number} has no integer 'step': {row!r}")
    write_jsonl_atomic(path, [row for row in rows if row["step"] <= resume_step])
