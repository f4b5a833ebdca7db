"""The search scorers, on questions of three data sets and on responses that models write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from caldera.errors import ConfigError, DataError
from caldera.reward_score import default_compute_score
from caldera.reward_score.qa_em import compute_score, last_answer, normalise

QUESTIONS = Path(__file__).parents[2] / "data" / "raw" / "search_qa" / "questions.jsonl"
BEIJING = {"target": ["Beijing", "Peking"]}


def test_every_answer_of_the_data_sets_is_right_for_its_own_question() -> None:
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    assert {row["source"] for row in rows} == {"hotpotqa", "musique", "nq"}
    for row in rows:
        source = f"searchR1_{row['source']}"
        for answer in row["answers"]:
            said = f"<think>Let me see.</think> <answer> {answer.upper()}. </answer>"
            assert default_compute_score(source, said, {"target": row["answers"]}) == 1.0
            assert default_compute_score(source, said, {"target": [f"no {answer}"]}) == 0.0


@pytest.mark.parametrize(
    ("solution", "em", "sub_em"),
    [
        ("<answer>Beijing</answer>", 1.0, 1.0),
        ("<answer> the  BEIJING! </answer>", 1.0, 1.0),
        ("<answer>Peking</answer>", 1.0, 1.0),
        ("<answer>It is Beijing.</answer>", 0.0, 1.0),
        ("<answer>Beijing</answer> no, <answer>Shanghai</answer>", 0.0, 0.0),
        ("<answer>Shanghai</answer> no, <answer>Beijing</answer>", 1.0, 1.0),
        ("<answer>Shanghai<answer>Beijing</answer>", 1.0, 1.0),
        ("<answer>Beijing</answer></answer>", 1.0, 1.0),
        ("<answer></answer>", 0.0, 0.0),
        ("</answer>Beijing<answer>", 0.0, 0.0),
        ("<answer>Beijing", 0.0, 0.0),
        ("Beijing", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_compute_score(solution: str, em: float, sub_em: float) -> None:
    assert compute_score(solution, BEIJING) == em
    assert compute_score(solution, BEIJING, method="sub_em") == sub_em


def test_scores_can_be_chosen() -> None:
    options: dict[str, Any] = {"format_score": 0.1, "score": 2.0}
    assert compute_score("<answer>Beijing</answer>", BEIJING, **options) == 2.0
    assert compute_score("<answer>Shanghai</answer>", BEIJING, **options) == 0.1
    assert compute_score("Beijing", BEIJING, **options) == 0.0


@pytest.mark.parametrize("tag", ["<answer>", "</answer>"])
def test_more_than_ten_tags_cost_three_quarters(tag: str) -> None:
    last = "<answer>Beijing</answer>"
    assert compute_score(tag * 9 + last, BEIJING) == 1.0
    assert compute_score(tag * 10 + last, BEIJING) == 0.25


def test_a_target_may_be_one_text() -> None:
    assert compute_score("<answer>Beijing</answer>", {"target": "Beijing"}) == 1.0
    assert compute_score("<answer>B</answer>", {"target": "Beijing"}) == 0.0


def test_what_is_left_of_an_answer() -> None:
    assert normalise("The  U.S.A., an Example") == "usa example"
    assert normalise("A") == "a", "nothing else would be left"
    assert compute_score("<answer>B</answer>", {"target": "A"}) == 0.0
    assert compute_score("<answer>...</answer>", {"target": "!"}, method="sub_em") == 0.0
    assert last_answer("<answer> 1\n2 </answer>") == "1\n2"


@pytest.mark.parametrize("truth", ["Beijing", {}, {"target": []}, {"target": None}, {"target": 3}])
def test_a_ground_truth_of_another_form_is_refused(truth: Any) -> None:
    with pytest.raises(DataError, match="'target': answer or list"):
        compute_score("<answer>Beijing</answer>", truth)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'f1'.*em or sub_em"):
        compute_score("<answer>Beijing</answer>", BEIJING, method="f1")
