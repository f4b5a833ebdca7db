"""What reward functions get by the names of their parameters, and how several make one score."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from caldera.api.rewards import BatchRewards, NamedRewards, score_function
from caldera.errors import ConfigError, RewardError

COLUMNS = ("answer", "difficulty", "index", "prompt")
INFO = {"answer": "4", "difficulty": 2, "index": 0, "prompt": "2+2="}


def scored(*rewards: Any, weights: list[float] | None = None) -> Any:
    function = score_function(rewards, weights, COLUMNS, text_prompts=True)
    assert isinstance(function, NamedRewards)
    return function("data", "4", "4", dict(INFO))


def in_batch(*rewards: Any, text_prompts: bool = True) -> Any:
    function = score_function(rewards, None, COLUMNS, text_prompts)
    assert isinstance(function, BatchRewards)
    return function(["data"] * 2, ["4", "55"], ["4", "5"], [dict(INFO), INFO | {"answer": "5"}])


def test_parameters_are_filled_by_name() -> None:
    assert scored(lambda response, answer: float(response == answer)) == 1.0
    assert scored(lambda response, row: (response, row["difficulty"])) == ("4", 2)
    assert scored(lambda response, prompt: prompt) == "2+2="
    assert scored(lambda response, **columns: columns["difficulty"]) == 2
    assert scored(lambda response, difficulty=7, missing=3: difficulty + missing) == 5


def test_the_first_parameter_is_the_response_whatever_it_is_called() -> None:
    assert scored(lambda text: text + "!") == "4!"
    assert scored(lambda text, answer: text == answer) is True
    assert scored(len) == 1


def test_verls_signature() -> None:
    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
    ) -> dict[str, Any]:
        return {"score": 1.0, "seen": (data_source, solution_str, ground_truth, extra_info)}

    seen = scored(compute_score)["seen"]
    assert seen[:3] == ("data", "4", "4") and seen[3]["difficulty"] == 2


def test_a_batch_as_trl_calls_it() -> None:
    def longest(
        completions: list[str], prompts: list[str], answer: list[str], **kwargs: Any
    ) -> Any:
        assert kwargs["difficulty"] == [2, 2] and prompts == ["2+2="] * 2
        most = max(map(len, completions))
        return [float(len(text) == most) for text in completions]

    assert in_batch(longest) == [0.0, 1.0]

    def of_messages(completions: list[list[dict[str, str]]], answer: list[str]) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [float(messages[0]["content"] == truth) for messages, truth in pairs]

    assert in_batch(of_messages, text_prompts=False) == [1.0, 0.0]


def test_several_rewards_are_a_weighted_sum_with_their_parts() -> None:
    def right(response: str, answer: str) -> float:
        return float(response == answer)

    def short(response: str) -> float:
        return -float(len(response))

    assert scored(right, short, weights=[1, 0.5]) == {"score": 0.5, "right": 1.0, "short": -1.0}

    def batch(completions: list[str], **_: Any) -> list[float | None]:
        return [None, 3.0]

    first, second = in_batch(right, batch)
    assert first == {"score": 1.0, "right": 1.0, "batch": None}
    assert second == {"score": 3.0, "right": 0.0, "batch": 3.0}


def test_async_rewards_are_awaited_together() -> None:
    async def slow(response: str) -> float:
        await asyncio.sleep(0)
        return 2.0

    async def whole(completions: list[str], **_: Any) -> list[float]:
        return [1.0 for _ in completions]

    def plain(response: str) -> int:
        return 1

    assert asyncio.run(scored(slow)) == 2.0
    assert asyncio.run(scored(slow, plain))["score"] == 3.0
    both = asyncio.run(in_batch(whole, slow))
    assert [each["score"] for each in both] == [3.0, 3.0]


def test_a_parameter_that_nothing_fills_is_an_error_that_lists_what_there_is() -> None:
    def wrong(response: str, anwser: str) -> float:
        return 0.0

    with pytest.raises(ConfigError, match=r"wrong has the parameter 'anwser'; there are answer, "):
        scored(wrong)

    def tokens(completions: list[str], completion_ids: list[int]) -> list[float]:
        return []

    with pytest.raises(ConfigError, match=r"completion_ids.*not available here"):
        in_batch(tokens)


def test_functions_need_names_of_their_own_and_weights_for_each() -> None:
    with pytest.raises(ConfigError, match="several functions are called reward"):
        scored(lambda response: 1, lambda response: 2)
    with pytest.raises(ConfigError, match=r"reward_weights=\[1.0\]: takes one for each of the 2"):
        scored(len, max, weights=[1])


def test_wrong_returns_are_failures_of_samples() -> None:
    with pytest.raises(RewardError, match="short returned 1 rewards for 2 completions"):

        def short(completions: list[str], **_: Any) -> list[float]:
            return [1.0]

        in_batch(short)
    with pytest.raises(RewardError, match="no reward applies: nothing returned None"):

        def nothing(response: str) -> None:
            return None

        scored(nothing)
