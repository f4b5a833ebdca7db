"""The scorer of DAPO's mathematics."""

from __future__ import annotations

import pytest

from caldera.reward_score import default_compute_score
from caldera.reward_score.math_dapo import compute_score, normalise


@pytest.mark.parametrize(
    ("answer", "normalised"),
    [
        ("34", "34"),
        ("$34$", "34"),
        (r"\boxed{34}", "34"),
        (r"$\boxed{34}$.", "34"),
        ("34 dollars", "34"),
        ("12cm", "12"),
        (r"12\text{ cm}^2", "12"),
        (r"9\,\text{m}", "9"),
        (r"30^\circ", "30"),
        (r"45\%", "45"),
        ("1,234,567", "1234567"),
        ("-1,000.5", "-1000.5"),
        ("(1,234)", "(1,234)"),  # a pair
        ("1,2", "1,2"),
        ("a triangle", "triangle"),
        (r"\text{triangle}", "triangle"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"2\text{ and }3", "2,3"),
        ("5m", "5m"),  # m may be a variable
        (r"\alpha + b", r"\alpha+b"),
        ("", ""),
    ],
)
def test_normalise(answer: str, normalised: str) -> None:
    assert normalise(answer) == normalised


@pytest.mark.parametrize(
    ("solution", "ground_truth", "right", "pred"),
    [
        ("Thus\nAnswer: 34", "34", True, "34"),
        ("answer : $34$ units\n", "34", True, "34"),
        ("Answer: 3\nNo.\nAnswer: 34", "34", True, "34"),
        ("Answer: x + y = 34", "34", True, "34"),
        ("Answer: 34", "x = 34", True, "34"),
        ("Answer: 34", 34, True, "34"),
        ("Answer: 35", "34", False, "35"),
        (r"\boxed{34}", "34", False, "[INVALID]"),
        ("34", "34", False, "[INVALID]"),
        ("", "34", False, "[INVALID]"),
        # Where an equation is wanted, its right side will not do.
        ("Answer: 0", "2x + y - 5 = 0", False, "0"),
        ("Answer: $2x + y - 5 = 0$", "2x+y-5=0", True, "2x+y-5=0"),
    ],
)
def test_the_answer_line(solution: str, ground_truth: object, right: bool, pred: str) -> None:
    result = compute_score(solution, ground_truth)
    assert result == {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred}


def test_only_the_end_counts() -> None:
    answer = "Answer: 34\n"
    assert compute_score(answer + "x" * (300 - len(answer)), "34")["acc"] == 1.0
    assert compute_score(answer + "x" * (301 - len(answer)), "34")["acc"] == 0.0


def test_a_strict_box_is_compared_letter_for_letter() -> None:
    right = compute_score(r"so \boxed{34}", "34", strict_box_verify=True)
    assert right == {"score": 1.0, "acc": 1.0, "pred": "34"}
    wrong = compute_score(r"so \boxed{34.0}", "34", strict_box_verify=True)
    assert wrong == {"score": -1.0, "acc": 0.0, "pred": "34.0"}
    early = compute_score(r"\boxed{34}" + "x" * 100, "34", strict_box_verify=True)
    assert early == {"score": -1.0, "acc": 0.0, "pred": "[INVALID]"}


@pytest.mark.parametrize(
    "data_source", ["math_dapo", "math", "math_dapo_reasoning", "aime", "aime2024", "aime25"]
)
def test_it_serves_its_data_sources(data_source: str) -> None:
    assert default_compute_score(data_source, "Answer: 1", "1") == {
        "score": 1.0,
        "acc": 1.0,
        "pred": "1",
    }
