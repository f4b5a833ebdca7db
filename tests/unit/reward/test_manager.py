"""The naive reward manager, with a real tokenizer and real score functions."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from caldera.data import object_array
from caldera.errors import ConfigError, DataError, RewardError, UnsupportedError
from caldera.protocol import DataProto
from caldera.reward import OUTCOMES, NaiveRewardManager, compute_reward, samples
from caldera.reward.samples import Outcome
from caldera.reward.scoring import ScoringLimits

MakeData = Callable[..., DataProto]


def test_the_score_stands_on_the_last_token(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    # `$` ends a response: a token like any other, but none of the text that is scored.
    data = make_data([("1+2=", "3", "3"), ("9+4=", "13$", "13"), ("2+2=", "5$", "4")])
    rewards, extra = compute_reward(data, NaiveRewardManager(tokenizer, num_examine=0))
    assert rewards.tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert rewards.dtype == torch.float32
    assert extra == {"score": [1, 1, 0], "acc": [1, 1, 0], "pred": ["3", "13", "5"]}


def test_without_return_dict_it_is_the_tensor_alone(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    result = NaiveRewardManager(tokenizer, 0)(make_data([("1+2=", "3", "3")]))
    assert isinstance(result, torch.Tensor)
    assert result.tolist() == [[1, 0, 0]]


def test_an_empty_response_is_scored_and_writes_nothing(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    manager = NaiveRewardManager(tokenizer, 0, compute_score=lambda **call: len(call) + 0.5)
    rewards, extra = compute_reward(make_data([("1=", "", "1"), ("1=", "1", "1")]), manager)
    assert rewards.tolist() == [[0, 0, 0], [4.5, 0, 0]]
    assert extra == {"acc": [4.5, 4.5]}


def test_given_scores_are_passed_on(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    def never(**call: Any) -> float:
        raise AssertionError("scored although there are scores")

    data = make_data([("1=", "1", "1"), ("1=", "2", "1")], acc=[1.0, 0.0], other=["x", "y"])
    assert data.batch is not None
    data.batch["rm_scores"] = torch.tensor([[0.0, 0.25, 0], [0.5, 0, 0]])
    data.meta_info["reward_extra_keys"] = ["acc"]
    rewards, extra = compute_reward(data, NaiveRewardManager(tokenizer, 0, never))
    assert rewards.tolist() == [[0, 0.25, 0], [0.5, 0, 0]]
    assert extra == {"acc": [1.0, 0.0]}


def test_what_a_score_function_is_told(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    calls: list[dict[str, Any]] = []

    def record(**call: Any) -> float:
        calls.append(call)
        return 0.0

    own = {"index": 7}
    data = make_data(
        [("1+1=", "2", ["2", "two"])],
        kind=["sums"],
        extra_info=[own],
        __num_turns__=[np.int32(2)],
        turn_scores=[[0.5]],
        tool_rewards=[[1.0]],
        reward_scores=[{"tool": 1.0}],
    )
    NaiveRewardManager(tokenizer, 0, record, reward_fn_key="kind", weight=3)(data)
    assert calls == [
        {
            "data_source": "sums",
            "solution_str": "2",
            "ground_truth": ["2", "two"],
            "extra_info": {
                "index": 7,
                "num_turns": 2,
                "turn_scores": [0.5],
                "tool_rewards": [1.0],
                "rollout_reward_scores": {"tool": 1.0},
            },
            "weight": 3,
        }
    ]
    assert own == {"index": 7}, "the row's own extra_info was changed"


def test_extra_info_may_be_absent_or_none(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    def told(extra_info: Any, **call: Any) -> dict[str, Any]:
        return {"score": 0.0, "told": extra_info}

    rows = [("1=", "1", "1")]
    for data in [make_data(rows), make_data(rows, extra_info=[None])]:
        _, extra = compute_reward(data, NaiveRewardManager(tokenizer, 0, told))
        assert extra["told"] == [{}]


def test_mixed_results_make_lists_of_equal_length(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    results = iter(
        [True, np.float32(0.5), torch.tensor(2.0), {"score": 1, "acc": np.True_, "pred": "x"}]
    )
    manager = NaiveRewardManager(tokenizer, 0, lambda **call: next(results))
    rewards, extra = compute_reward(make_data([("1=", "1", "1")] * 4), manager)
    assert rewards[:, 0].tolist() == [1.0, 0.5, 2.0, 1.0]
    assert extra == {
        "acc": [True, 0.5, 2.0, True],
        "score": [None, None, None, 1],
        "pred": [None, None, None, "x"],
    }


def test_an_async_score_function(tokenizer: PreTrainedTokenizerFast, make_data: MakeData) -> None:
    async def compute_score(solution_str: str, ground_truth: str, **call: Any) -> float:
        return float(solution_str == ground_truth)

    manager = NaiveRewardManager(tokenizer, 0, compute_score)
    data = make_data([("1=", "1", "1"), ("2=", "2", "3")])
    for _ in range(2):
        rewards, extra = compute_reward(data, manager)
        assert rewards[:, 0].tolist() == [1.0, 0.0]
        assert extra == {"acc": [1.0, 0.0]}


def crash(**call: Any) -> float:
    raise ZeroDivisionError("by zero")


async def crash_later(**call: Any) -> float:
    raise ZeroDivisionError("by zero")


@pytest.mark.parametrize("compute_score", [crash, crash_later])
def test_a_score_function_that_raises(
    tokenizer: PreTrainedTokenizerFast,
    compute_score: Callable[..., Any],
    make_data: MakeData,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(samples, "_traceback_is_shown", threading.Event())
    data = make_data([("1=", "12", "truth"), ("1=", "3", "1")], uid=["u-5", "u-6"])
    with caplog.at_level(logging.ERROR):
        rewards, extra = compute_reward(data, NaiveRewardManager(tokenizer, 0, compute_score))
    assert rewards.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert extra["reward_state"] == ["failed", "failed"]
    (error,) = set(extra["reward_error"])
    assert re.fullmatch(
        r"the score function raised ZeroDivisionError: by zero \(test_manager.py:\d+\)", error
    )
    traced, told = caplog.records  # the first alone
    assert 'raise ZeroDivisionError("by zero")' in traced.getMessage()
    message = told.getMessage()
    assert message.startswith("2 of 2 samples could not be scored. The first: row 0 (uid u-5): ")
    for part in [error, "arithmetic", "'truth'", "'12'"]:
        assert part in message


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("1.0", "'1.0'"),
        (None, "None"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (torch.tensor([1.0, 2.0]), "tensor"),
        ({"acc": 1.0}, "without 'score', with acc"),
        ({}, "without 'score', with nothing"),
        ({"score": None}, "None"),
        ({"score": np.float64("nan")}, "nan"),
        ({"score": 1.0, "reward_state": "ok"}, "'reward_state' is a reserved name"),
        ({"score": 1.0, "reward_error": None}, "'reward_error' is a reserved name"),
        ({"score": 1.0, "call": lambda: 0}, "cannot be sent to another process"),
    ],
)
def test_a_score_function_that_returns_nonsense(
    tokenizer: PreTrainedTokenizerFast, returned: Any, problem: str, make_data: MakeData
) -> None:
    results = iter([1.0, returned, 0.5])
    manager = NaiveRewardManager(tokenizer, 0, lambda **call: next(results))
    rewards, extra = compute_reward(make_data([("1=", "1", "1")] * 3), manager)
    assert rewards[:, 0].tolist() == [1.0, 0.0, 0.5]
    assert extra["acc"] == [1.0, None, 0.5]
    assert extra["reward_state"] == ["value", "failed", "value"]
    assert extra["reward_error"][::2] == [None, None]
    assert problem in extra["reward_error"][1]


def parse(**call: Any) -> float:
    return float(json.loads("{"))


def test_the_place_of_an_error_is_in_the_users_code(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    _, extra = compute_reward(
        make_data([("1=", "1", "1")]), NaiveRewardManager(tokenizer, 0, parse)
    )
    line = parse.__code__.co_firstlineno + 1
    assert extra["reward_error"][0].endswith(f" (test_manager.py:{line})")


def test_a_scorer_that_cannot_be_used_for_any_sample_stops_the_run(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    def unusable(**call: Any) -> float:
        raise UnsupportedError("no sandbox here")

    with pytest.raises(UnsupportedError, match="no sandbox here"):
        compute_reward(make_data([("1=", "1", "1")]), NaiveRewardManager(tokenizer, 0, unusable))


def test_a_service_that_does_not_answer_is_a_failure(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    def unanswered(**call: Any) -> float:
        raise RewardError("no answer from http://judge\nwith details")

    manager = NaiveRewardManager(tokenizer, 0, unanswered)
    _, extra = compute_reward(make_data([("1=", "1", "1")]), manager)
    assert extra["reward_error"] == ["no answer from http://judge"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_score_function_that_hangs(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData, is_async: bool
) -> None:
    release = threading.Event()

    def hang(solution_str: str, **call: Any) -> float:
        if solution_str == "2":
            release.wait()
        return 1.0

    async def hang_later(solution_str: str, **call: Any) -> float:
        await asyncio.sleep(10_000 if solution_str == "2" else 0)
        return 1.0

    manager = NaiveRewardManager(tokenizer, 0, hang_later if is_async else hang)
    manager.limits = ScoringLimits(timeout=3.0)
    data = make_data([("1=", answer, "1") for answer in "1213"])
    rewards, extra = compute_reward(data, manager)
    release.set()
    assert rewards[:, 0].tolist() == [1, 0, 1, 1]
    assert extra["reward_state"] == ["value", "timed_out", "value", "value"]
    assert extra["reward_error"][1] == "the score function took longer than 3 s"


def test_results_do_not_depend_on_the_order_of_completion(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    """Every call waits for the one after it."""
    ended = {str(number): threading.Event() for number in range(1, 6)}
    ended["5"].set()

    def last_first(solution_str: str, **call: Any) -> float:
        following = str(min(int(solution_str) + 1, 5))
        assert ended[following].wait(30)
        ended[solution_str].set()
        return float(solution_str)

    manager = NaiveRewardManager(tokenizer, 0, last_first)
    manager.limits = ScoringLimits(num_workers=4)
    rewards, extra = compute_reward(make_data([("1=", a, "1") for a in "1234"]), manager)
    assert rewards[:, 0].tolist() == extra["acc"] == [1, 2, 3, 4]


def test_outcomes_that_are_known_are_not_computed_again(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    heard: list[str] = []

    def listen(solution_str: str, **call: Any) -> float:
        heard.append(solution_str)
        return 0.25

    data = make_data([("1=", "1", "1"), ("1=", "22", "1"), ("1=", "333", "1")])
    known = [Outcome(0.5, {"acc": 0.5, "x": "y"}), None, Outcome(state="timed_out", error="late")]
    data.non_tensor_batch[OUTCOMES] = object_array(known)
    rewards, extra = compute_reward(data, NaiveRewardManager(tokenizer, 0, listen))
    assert heard == ["22"]
    assert rewards.tolist() == [[0.5, 0, 0], [0, 0.25, 0], [0, 0, 0]]
    assert extra == {
        "acc": [0.5, 0.25, None],
        "x": ["y", None, None],
        "reward_state": ["value", "value", "timed_out"],
        "reward_error": [None, None, "late"],
    }


def test_an_unknown_data_source(tokenizer: PreTrainedTokenizerFast, make_data: MakeData) -> None:
    data = make_data([("1=", "1", "1")], data_source="nowhere")
    with pytest.raises(ConfigError, match=r"^no scorer serves the data source 'nowhere'"):
        compute_reward(data, NaiveRewardManager(tokenizer, 0))


@pytest.mark.parametrize("column", ["data_source", "reward_model"])
def test_a_missing_column(
    tokenizer: PreTrainedTokenizerFast, column: str, make_data: MakeData
) -> None:
    data = make_data([("1=", "1", "1")], extra_info=[{}])
    del data.non_tensor_batch[column]
    with pytest.raises(DataError) as raised:
        NaiveRewardManager(tokenizer, 0)(data)
    message = str(raised.value)
    assert f"needs the column {column!r}" in message
    there = ", ".join(sorted(data.non_tensor_batch))
    assert message.endswith(f"the data has {there}")


def test_a_missing_ground_truth(tokenizer: PreTrainedTokenizerFast, make_data: MakeData) -> None:
    data = make_data([("1=", "1", "1")] * 2)
    data.non_tensor_batch["reward_model"][1] = {"style": "rule"}
    with pytest.raises(DataError, match=r"row 1: .*'reward_model'.*'ground_truth'.*'style'"):
        NaiveRewardManager(tokenizer, 0)(data)


def test_extra_info_that_is_no_dict(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    data = make_data([("1=", "1", "1")], extra_info=["text"])
    with pytest.raises(DataError, match=r"row 0: .*'extra_info'.*'text'"):
        NaiveRewardManager(tokenizer, 0)(data)


def test_the_first_samples_of_each_data_source_are_shown(
    tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str], make_data: MakeData
) -> None:
    sources = ["caldera/arithmetic", "caldera/arithmetic", "openai/gsm8k"]
    data = make_data([("1+1", "2$", "2"), ("1+2", "3", "3"), ("1+3=", "4", "4")], sources)
    NaiveRewardManager(tokenizer, num_examine=1)(data)
    shown = capsys.readouterr().out
    assert shown.splitlines()[:4] == [
        "[prompt] 1+1",
        "[response] 2",
        "[ground_truth] 2",
        "[score] 1.0",
    ]
    assert "[prompt] 1+3=" in shown
    assert "1+2" not in shown

    NaiveRewardManager(tokenizer, num_examine=0)(data)
    assert capsys.readouterr().out == ""
