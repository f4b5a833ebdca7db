"""Whatever a model writes, no scorer raises, and none takes long."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from caldera.reward_score import (
    Program,
    ProgramResult,
    arithmetic,
    geo3k,
    gsm8k,
    hendrycks_math,
    math_dapo,
    prime_code,
    prime_math,
    qa_em,
    qa_em_format,
    symbolic,
)

LATEX = [r"\boxed", r"\boxed{", r"\fbox{", r"\frac", r"\frac{", r"\sqrt", r"\text{", r"\left("]
SIGNS = [*"{}$%^_=.,-+/!()[]\\ \n", "0", "12", "1e9", "inf", "nan", "\ud800", "\0", "\u0661"]
TAGS = [
    f"<{end}{name}>" for name in ("answer", "think", "search", "information") for end in ("", "/")
]
PIECES = [*LATEX, *SIGNS, *TAGS, "#### ", "Answer:", "```", "```python\n"]
OUTPUTS = st.text(max_size=400) | st.lists(
    st.sampled_from(PIECES) | st.text(max_size=5), max_size=60
).map("".join)
LONG = [piece * 20_000 for piece in PIECES]
# None takes more than some 0.03 s. A busy machine needs longer, but by far not this long; a pattern
# that starts anew at every place of a long text does.
IN_TIME = settings(
    max_examples=60,
    deadline=timedelta(seconds=10),
    suppress_health_check=[HealthCheck.too_slow],
)
TARGET = {"target": ["Beijing"]}


def fails(programs: Sequence[Program]) -> Iterator[ProgramResult]:
    for _ in programs:
        yield ProgramResult(stdout="", completed=False)


TEXT_SCORERS: dict[str, Callable[[str], Any]] = {
    "arithmetic": lambda text: arithmetic.compute_score(text, "12"),
    "gsm8k": lambda text: gsm8k.compute_score(text, "12"),
    "gsm8k-flexible": lambda text: gsm8k.compute_score(text, "12", method="flexible"),
    "math": lambda text: hendrycks_math.compute_score(text, r"\frac{1}{2}"),
    "math_dapo": lambda text: math_dapo.compute_score(text, "12"),
    "math_dapo-box": lambda text: math_dapo.compute_score(text, "12", strict_box_verify=True),
    "qa_em": lambda text: qa_em.compute_score(text, TARGET),
    "qa_sub_em": lambda text: qa_em.compute_score(text, TARGET, method="sub_em"),
    "qa_em_format": lambda text: qa_em_format.compute_score(text, TARGET),
    "prime_code": lambda text: prime_code.compute_score(
        text, {"inputs": ["1"], "outputs": ["1"]}, fails
    ),
}


def score_of(returned: Any) -> float:
    return float(returned["score"] if isinstance(returned, dict) else returned)


def check(scorer: Callable[[str], Any], text: str) -> None:
    assert math.isfinite(score_of(scorer(text)))
    assert math.isfinite(score_of(scorer(f"\\boxed{{{text}}}")))


@pytest.mark.parametrize("name", TEXT_SCORERS)
@IN_TIME
@given(text=OUTPUTS)
def test_scorers_of_text(name: str, text: str) -> None:
    check(TEXT_SCORERS[name], text)


@pytest.mark.parametrize("name", TEXT_SCORERS)
@settings(IN_TIME, max_examples=len(LONG))
@given(text=st.sampled_from(LONG))
def test_long_output(name: str, text: str) -> None:
    check(TEXT_SCORERS[name], text)


@pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs math-verify, the extra math"
)
def test_symbolic_scorers() -> None:
    symbolic.equal("1", "2")  # starts the process, which takes its time once

    @IN_TIME
    @given(OUTPUTS, st.sampled_from([prime_math, geo3k]))
    @example("9^{9^{9^{9}}}", prime_math)
    @example("(" * 1000, geo3k)
    def check_scorer(text: str, scorer: Any) -> None:
        solution = f"<think></think>\\boxed{{{text}}}"
        score = scorer.compute_score(solution, r"\frac{1}{2}", cpu_seconds=0.1)
        assert 0.0 <= score <= 1.0

    check_scorer()
