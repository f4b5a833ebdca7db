"""The scorer of the built-in arithmetic task."""

from __future__ import annotations

import pytest

from caldera.reward_score import default_compute_score


@pytest.mark.parametrize(
    ("solution", "ground_truth", "score"),
    [
        ("12", "12", 1.0),
        (" 12\n", "12", 1.0),
        ("-3", "-3", 1.0),
        ("12", 12, 1.0),
        ("13", "12", 0.0),
        ("012", "12", 0.0),
        ("12.0", "12", 0.0),
        ("12 13", "12", 0.0),
        ("= 12", "12", 0.0),
        ("", "12", 0.0),
    ],
)
def test_only_the_bare_integer_counts(solution: str, ground_truth: object, score: float) -> None:
    result = default_compute_score("caldera/arithmetic", solution, ground_truth)
    assert result == {"score": score, "acc": score, "pred": solution.strip()}
