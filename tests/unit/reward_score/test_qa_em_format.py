"""The search scorer that looks at the form of a response too."""

from __future__ import annotations

import pytest

from caldera.reward_score.qa_em_format import compute_score, has_form

TRUTH = {"target": ["Beijing"]}
SEARCH = (
    "<search>capital of China</search>\n\n<information>Doc 1(Title: China) {}</information>\n\n"
)
FOUND = "<think>a</think>\n" + SEARCH.format("Its capital is Beijing.") + "<think>b</think>"
NOT_FOUND = "<think>a</think>\n" + SEARCH.format("It is large.") + "<think>b</think>"


@pytest.mark.parametrize(
    "solution",
    [
        "<think>a</think><answer>b</answer>",
        " <think>a < b</think>\n<answer></answer>\n",
        FOUND + "<answer>b</answer>",
        FOUND + SEARCH.format("") + "<think>c</think>" + "<answer>b</answer>",
    ],
)
def test_the_right_form(solution: str) -> None:
    assert has_form(solution)


@pytest.mark.parametrize(
    "solution",
    [
        "",
        "<answer>b</answer>",
        "<think>a</think>",
        "<think>a</think><answer>b",
        "<think>a</think><answer>b</answer> and more",
        "well <think>a</think><answer>b</answer>",
        "<think>a</think> so <answer>b</answer>",
        "<think>a</think><answer>b</answer><answer>c</answer>",
        "<think>a<answer>b</answer></think>",
        "<think>a</answer>",
        "</think><answer>b</answer>",
        "<think>a</think><search>c</search><think>d</think><answer>b</answer>",
        "<think>a</think><information>c</information><think>d</think><answer>b</answer>",
        "<think>a</think><search>c</search><information>d</information><answer>b</answer>",
    ],
)
def test_the_wrong_form(solution: str) -> None:
    assert not has_form(solution)


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        (FOUND + "<answer>Beijing</answer>", 1.0),
        ("<answer>Beijing</answer>", 0.75),
        (FOUND + "<answer>Shanghai</answer>", 0.375),
        (NOT_FOUND + "<answer>Shanghai</answer>", 0.25),
        ("<answer>Shanghai</answer>", 0.0625),
        (FOUND, 0.0),
        ("", 0.0),
    ],
)
def test_compute_score(solution: str, score: float) -> None:
    result = compute_score(
        solution,
        TRUTH,
        structure_format_score=0.25,
        final_format_score=0.0625,
        retrieval_score=0.125,
    )
    assert result == score
