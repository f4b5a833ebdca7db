"""From a row's `data_source` to the scorer that serves it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from caldera.errors import ConfigError, DataError, nearest
from caldera.registry import Registry
from caldera.reward_score.code_tests import Program, ProgramResult, RunTests

Score = float | dict[str, Any]
"""A number, or a dict with `score` and whatever else is worth recording about the sample."""

Scorer = Callable[..., Score]
"""`scorer(solution_str, ground_truth, **options)`: judges an answer by its text alone."""

AnyScorer = TypeVar("AnyScorer", bound=Scorer)

SCORERS: Registry[Scorer] = Registry("scorer for the data source")
"""Scorers by the data source they serve; a name that ends in `*` serves all that begin with it."""


def register_scorer(*data_sources: str) -> Callable[[AnyScorer], AnyScorer]:
    """Decorate a scorer with the data sources that it serves, such as `"math"` or `"aime*"`."""

    def add(scorer: AnyScorer) -> AnyScorer:
        for data_source in data_sources:
            SCORERS.register(data_source)(scorer)
        return scorer

    return add


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    run_tests: RunTests | None = None,
    **kwargs: Any,
) -> Score:
    """Score an answer with the scorer that serves its data source; `kwargs` are its options.

    `run_tests` runs the programs of code problems in a sandbox; only their scorers get it.
    `extra_info` belongs to the contract of score functions; the scorers here need none of it.
    """
    scorer = find_scorer(data_source)
    if reads_truth(scorer) and _is_null(ground_truth):
        raise DataError(
            f"reward_model.ground_truth={ground_truth}: the scorer of the data source "
            f"{data_source!r} needs a ground truth; drop such rows, or score them with a custom "
            "function (custom_reward_function.path)"
        )
    if "run_tests" in inspect.signature(scorer).parameters:
        kwargs["run_tests"] = run_tests
    return scorer(solution_str, ground_truth, **kwargs)


def reads_truth(scorer: Scorer) -> bool:
    """Whether a scorer needs the ground truth: all of Caldera's do, a registered one may not."""
    return scorer.__module__.partition(".")[0] == __name__.partition(".")[0]


def _is_null(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def find_scorer(data_source: str) -> Scorer:
    if data_source in SCORERS:
        return SCORERS[data_source]
    patterns = (name for name in SCORERS if name.endswith("*"))
    matching = [pattern for pattern in patterns if data_source.startswith(pattern[:-1])]
    if matching:
        return SCORERS[max(matching, key=len)]
    guess = nearest(data_source, SCORERS)
    hint = f"; did you mean {guess!r}?" if guess else ""
    raise ConfigError(
        f"no scorer serves the data source {data_source!r}{hint} (known: {', '.join(SCORERS)}); to "
        "score it with a custom function, set custom_reward_function.path to the Python file that "
        "defines it, and custom_reward_function.name to its name there (compute_score)"
    )


# ---- What a scorer needs, found out before there is an answer

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
