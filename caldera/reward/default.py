"""The score function of a run that names none: scorers by data source, programs in the sandbox."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from caldera.reward.sandbox import Sandbox
from caldera.reward_score import Score, default_compute_score
from caldera.reward_score.code_tests import Program, ProgramResult

__all__ = ["score_by_data_source"]


def score_by_data_source(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> Score:
    """What `default_compute_score` says, with code problems tested in this machine's sandbox."""
    return default_compute_score(
        data_source, solution_str, ground_truth, extra_info, run_tests=_run_tests, **kwargs
    )


def _run_tests(programs: Sequence[Program]) -> Iterator[ProgramResult]:
    """One by one, since whoever reads may stop at the first that fails."""
    sandbox = _sandbox()
    for program in programs:
        if program.asserts:
            outcome = sandbox.check(program.source, program.asserts)
        else:
            outcome = sandbox.run(program.source, program.stdin)
        yield ProgramResult(outcome.stdout, outcome.ok)


@cache
def _sandbox() -> Sandbox:
    """Started by the first code problem, ended with the process."""
    sandbox = Sandbox(slots=1)
    atexit.register(sandbox.close)
    return sandbox
