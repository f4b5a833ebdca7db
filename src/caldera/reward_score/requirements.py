"""What a scorer needs, found out before there is an answer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from caldera.errors import ConfigError
from caldera.reward_score.code_tests import Program, ProgramResult
from caldera.reward_score.routing import find_scorer

__all__ = ["check_scorer"]

GIVEN = ("solution_str", "ground_truth", "run_tests")
"""Arguments of scorers that are no options."""


def check_scorer(data_source: str, ground_truth: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a scorer serves the data source, takes the options
    (`reward_model.reward_kwargs`), and has the libraries that it needs; DataError for a ground
    truth that it cannot read."""
    scorer = find_scorer(data_source)
    parameters = inspect.signature(scorer).parameters
    taken = [name for name in parameters if name not in GIVEN]
    for name, value in options.items():
        if name not in taken:
            raise ConfigError(
                f"reward_model.reward_kwargs.{name}={value!r}: the scorer of the data source "
                f"{data_source!r} takes {', '.join(taken) or 'no options'}"
            )
    programs = {"run_tests": _none_passes} if "run_tests" in parameters else {}
    scorer("", ground_truth, **programs, **options)


def _none_passes(programs: Sequence[Program]) -> list[ProgramResult]:
    """In place of a sandbox."""
    return [ProgramResult("", completed=False) for _ in programs]
