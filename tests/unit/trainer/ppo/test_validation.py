"""Validation answers that could not be scored are counted, and in no mean."""

from __future__ import annotations

import torch

from caldera.protocol import DataProto
from caldera.trainer.ppo.validation import (
    Responses,
    ground_truths,
    name_validation_metrics,
    process_validation_metrics,
)


def scored(with_failure: bool) -> Responses:
    answers = Responses()
    answers.scores = [1.0, 0.0, 0.0, 1.0]
    answers.sources = ["a", "a", "b", "b"]
    answers.uids = ["1", "2", "3", "3"]
    answers.is_rewarded = [True, not with_failure, True, True]
    if with_failure:
        states = ["value", "timed_out", None, None]  # of two batches, one without a failure
        answers.extras = {"reward_state": states, "acc": [1.0, None, 0.0, 1.0]}
    return answers


def test_failures_are_counted_and_in_no_mean() -> None:
    answers = scored(with_failure=True)
    assert answers.failures() == {
        "val-aux/a/reward_failed/count": 1.0,
        "val-aux/b/reward_failed/count": 0.0,
    }
    found = name_validation_metrics(
        process_validation_metrics(answers.sources, answers.uids, answers.variables())
    )
    assert found["val-core/a/acc/mean@1"] == found["val-aux/a/reward/mean@1"] == 1.0
    assert found["val-aux/b/reward/mean@2"] == 0.5


def test_the_share_in_which_a_function_finds_an_answer() -> None:
    answers = scored(with_failure=False)
    assert answers.answered() == {}
    answers.extras["pred"] = ["7", "", None, "[INVALID]"]
    assert answers.answered() == {"a": {"parsed": 0.5}, "b": {"parsed": 0.0}}


def test_without_failures() -> None:
    answers = scored(with_failure=False)
    assert answers.failures() == {
        "val-aux/a/reward_failed/count": 0.0,
        "val-aux/b/reward_failed/count": 0.0,
    }
    assert answers.variables()["reward"] == [1.0, 0.0, 0.0, 1.0]


def test_rows_may_have_nothing_to_compare_with() -> None:
    tensors = {"responses": torch.ones(2, 1)}
    assert ground_truths(DataProto.from_dict(tensors)) == [None, None]
    rows = {"reward_model": [{"ground_truth": "4"}, None]}
    assert ground_truths(DataProto.from_dict(tensors, rows)) == ["4", None]
