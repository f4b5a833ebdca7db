from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from caldera.commands.statistics import (
    PromptScores,
    best_at_k,
    compare,
    estimate,
    majority_at_k,
    measures,
    pass_at_k,
    sizes,
)


def prompt(scores: Any, predictions: Any = None) -> Any:
    array = np.array(scores, dtype=float)
    return PromptScores(array, array >= 1, None if predictions is None else tuple(predictions))


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_and_best_are_those_of_all_choices_of_k(k: int) -> None:
    scores = np.array([0.0, 1.0, 0.3, 0.0, 1.0])
    chosen = list(combinations(range(5), k))
    passes = np.mean([max(scores[list(c)]) >= 1 for c in chosen])
    best = np.mean([max(scores[list(c)]) for c in chosen])
    assert pass_at_k(scores >= 1, k) == pytest.approx(passes)
    assert best_at_k(scores, k) == pytest.approx(best)


def test_a_majority_is_that_of_all_choices_of_k() -> None:
    answers = prompt([1, 1, 0, 0, 0], ["7", "7", "8", "9", None])
    rng = np.random.default_rng(0)
    assert majority_at_k(answers, 5, rng) == 1
    assert majority_at_k(answers, 1, rng) == pytest.approx(0.4, abs=0.05)
    # of three: 7 leads in 3 x 1 + 0 draws outright (two sevens), ties elsewhere
    exact = []
    for chosen in combinations(range(5), 3):
        kinds = [answers.predictions[i] for i in chosen]
        counts = {kind: kinds.count(kind) for kind in kinds}
        leaders = [kind for kind, count in counts.items() if count == max(counts.values())]
        exact.append(np.mean([kind == "7" for kind in leaders]))
    assert majority_at_k(answers, 3, rng) == pytest.approx(np.mean(exact), abs=0.05)


def test_a_tie_counts_by_halves() -> None:
    tied = prompt([1, 0], ["7", "8"])
    assert majority_at_k(tied, 2, np.random.default_rng(0)) == 0.5


def test_measures_of_one_answer_a_prompt() -> None:
    found = measures([prompt([1.0], ["7"]), prompt([0.0], ["8"])])
    assert set(found) == {"mean@1", "pass@1"}
    assert found["mean@1"].value == 0.5


def test_measures_of_several_answers() -> None:
    found = measures([prompt([1, 0, 0, 1], "abba"), prompt([0, 0, 0, 0], "cccc")])
    assert list(found) == [
        "mean@4", "pass@1", "pass@2", "pass@4", "best@2", "best@4", "maj@2", "maj@4",
    ]  # fmt: skip
    assert found["pass@4"].value == 0.5
    assert found["pass@1"].value == found["mean@4"].value == 0.25
    assert found["maj@4"].value == pytest.approx(0.25)


def test_answers_that_cannot_be_told_apart_have_no_majority() -> None:
    assert not any(name.startswith("maj") for name in measures([prompt([1, 0])]))


def test_the_smallest_number_of_answers_decides() -> None:
    assert "mean@2" in measures([prompt([1, 0, 1]), prompt([0, 0])])
    assert sizes(5) == [1, 2, 4, 5]


def test_an_interval_does_not_collapse_when_all_prompts_agree() -> None:
    found = estimate([1.0] * 20)
    assert found.high == 1 and 0.8 < found.low < 0.9


@pytest.mark.parametrize("make", [lambda r: r.random(40) < 0.3, lambda r: r.random(40) ** 2])
def test_95_of_100_intervals_hold_the_truth(make: Callable[..., Any]) -> None:
    rng = np.random.default_rng(1)
    truth = np.mean([make(rng).mean() for _ in range(4000)])
    held = 0
    for seed in range(200):
        found = estimate(make(rng).astype(float), seed)
        held += found.low <= truth <= found.high
    assert 180 <= held <= 199


def test_a_comparison_finds_a_difference_and_no_difference() -> None:
    rng: Any = np.random.default_rng(0)
    first = rng.random(200)
    found = compare(first + 0.1, first + rng.normal(0, 0.1, 200))
    assert found.p_value < 0.001
    assert found.difference.low < 0.1 < found.difference.high
    assert found.better > found.worse
    nothing = compare(first, first)
    assert nothing.p_value == 1 and nothing.difference.value == 0


def test_few_prompts_are_compared_exactly() -> None:
    # all five differ the same way: 2 of 32 sign patterns are as extreme
    assert compare([1, 1, 1, 1, 1], [0, 0, 0, 0, 0]).p_value == pytest.approx(2 / 32)
    assert compare([1, 0, 1], [1, 0, 1]).p_value == 1


def test_p_values_are_uniform_where_nothing_differs() -> None:
    rng: Any = np.random.default_rng(3)
    values = [compare(rng.random(30), rng.random(30), seed).p_value for seed in range(200)]
    assert 2 <= sum(value < 0.05 for value in values) <= 20
