"""The MATH scorer: ways of writing one answer, and answers that only look alike."""

from __future__ import annotations

import pytest

from caldera.reward_score import default_compute_score
from caldera.reward_score.hendrycks_math import compute_score, same_answer


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\tfrac12", r"\frac{1}{2}"),
        (r"\frac 1 2", r"\frac{1}{2}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"\frac{50}3", r"\frac{50}{3}"),
        ("3/7", r"\frac{3}{7}"),
        ("-3/7", r"\frac{-3}{7}"),
        ("0.5", r"\frac{1}{2}"),
        (".25", "0.25"),
        (r"x^{.5}", r"x^{0.5}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"2\sqrt 5", r"2\sqrt{5}"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"30^\circ", "30"),
        (r"30^{\circ}", "30"),
        (r"\$18", "18"),
        (r"40\%", "40"),
        (r"12\text{ cm}^2", "12"),
        (r"7 \text{ hours}.", "7"),
        ("x = 5", "5"),
        (r"1,\!000", "1,000"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ],
)
def test_ways_of_writing_one_answer(answer: str, reference: str) -> None:
    assert same_answer(answer, reference)
    assert same_answer(reference, answer)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("2", "3"),
        ("-2", r"-2 \text{ or } -12"),  # half an answer
        (r"\text{ yes}", r"\text{ no}"),  # a unit without a number is the answer
        ("5", "x + y = 5"),
        ("0.50", r"\frac{1}{2}"),
        ("(1,2)", "(2,1)"),
        (r"\leftarrow", "arrow"),
        ("", "1"),
    ],
)
def test_different_answers(answer: str, reference: str) -> None:
    assert not same_answer(answer, reference)


def test_it_reads_the_last_box() -> None:
    solution = r"First $\boxed{3}$; but the price is $\boxed{\$\dfrac{1}{2}}$."
    assert compute_score(solution, r"\frac12") == 1.0
    assert compute_score(solution, "3") == 0.0
    assert compute_score("The answer is 3.", "3") == 0.0
    assert compute_score(r"\boxed{3}", 3) == 1.0


@pytest.mark.parametrize(
    "data_source",
    ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"],
)
def test_it_serves_its_data_sources(data_source: str) -> None:
    assert default_compute_score(data_source, r"\boxed{\frac12}", "1/2") == 1.0
