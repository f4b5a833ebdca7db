"""The managers besides naive and dapo: batch, gdpo, limited, and verl's newer contract."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import PreTrainedTokenizerFast

from caldera.config import PPOTrainerConfig, compose_config
from caldera.errors import ConfigError
from caldera.protocol import DataProto
from caldera.reward import (
    REWARD_MANAGERS,
    BatchRewardManager,
    GDPORewardManager,
    LimitedRewardManager,
    compute_reward,
    load_reward_manager,
)
from caldera.reward.managers import MINUTE, RateLimiter
from caldera.reward.scoring import ScoringLimits

MakeData = Callable[..., DataProto]
ROWS = [("1+1=", "2", "2"), ("1+2=", "4", "3"), ("1+3=", "", "4")]


def test_every_manager_has_its_name() -> None:
    names = {"naive", "dapo", "batch", "prime", "gdpo", "limited", "rate_limited", "remote"}
    assert set(REWARD_MANAGERS) == names


# ---- batch


def test_a_batch_function_is_called_once(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    calls: list[dict[str, Any]] = []

    def of_all(**call: Any) -> list[Any]:
        calls.append(call)
        return [1.0, {"score": 0.5, "pred": "4"}, 2.0]

    manager = BatchRewardManager(tokenizer, 0, of_all, weight=3)
    rewards, extra = compute_reward(make_data(ROWS, extra_info=[{"i": 0}, None, {}]), manager)
    assert rewards.tolist() == [[1, 0, 0], [0.5, 0, 0], [0, 0, 0]]
    assert extra == {
        "acc": [1.0, None, 2.0],
        "score": [None, 0.5, None],
        "pred": [None, "4", None],
    }
    assert calls == [
        {
            "data_sources": ["caldera/arithmetic"] * 3,
            "solution_strs": ["2", "4", ""],
            "ground_truths": ["2", "3", "4"],
            "extra_infos": [{"i": 0}, {}, {}],
            "weight": 3,
        }
    ]


def test_an_async_batch_function(tokenizer: PreTrainedTokenizerFast, make_data: MakeData) -> None:
    async def of_all(solution_strs: list[str], **call: Any) -> list[float]:
        return [float(len(solution)) for solution in solution_strs]

    rewards, _ = compute_reward(make_data(ROWS), BatchRewardManager(tokenizer, 0, of_all))
    assert rewards[:, 0].tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("returned", "states", "said"),
    [
        ([1.0, None, 1.0], ["value", "failed", "value"], "finite number, and is None"),
        ([1.0, 2.0], ["failed"] * 3, "returned 2 scores for 3 samples"),
        (1.0, ["failed"] * 3, "must return a list of 3 scores, and returned a float"),
        ("abc", ["failed"] * 3, "returned a str"),
    ],
)
def test_nonsense_from_a_batch_function(
    tokenizer: PreTrainedTokenizerFast,
    make_data: MakeData,
    returned: Any,
    states: list[str],
    said: str,
) -> None:
    manager = BatchRewardManager(tokenizer, 0, lambda **call: returned)
    _, extra = compute_reward(make_data(ROWS), manager)
    assert extra["reward_state"] == states
    assert said in extra["reward_error"][1]


def test_a_batch_function_that_hangs(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    release = threading.Event()
    manager = BatchRewardManager(tokenizer, 0, lambda **call: release.wait())
    manager.limits = ScoringLimits(timeout=0.2)
    _, extra = compute_reward(make_data(ROWS), manager)
    release.set()
    assert extra["reward_state"] == ["timed_out"] * 3


# ---- gdpo


def test_gdpo_keeps_rewards_apart_and_adds_them_up(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    returned = iter(
        [
            {"right": True, "form": 0.5},
            {"right": 0.0, "form": 1.0, "score": 7.0, "note": "x"},
            {"right": 1.0, "form": None},
        ]
    )
    manager = GDPORewardManager(
        tokenizer, 0, lambda **call: next(returned),
        reward_keys=["right", "form"], reward_weights=[2.0, 1.0],
    )  # fmt: skip
    rewards, extra = compute_reward(make_data([("1=", "1", "1")] * 3), manager)
    assert rewards[:, 0].tolist() == [2.5, 7.0, 0.0]
    assert extra["right"] == [1.0, 0.0, None]
    assert extra["form"] == [0.5, 1.0, None]
    assert extra["note"] == [None, "x", None]
    assert extra["reward_error"][2] == "the reward 'form' must be a finite number, and is None"


def test_gdpo_needs_the_names_of_its_rewards(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    with pytest.raises(ConfigError, match=r"needs algorithm\.gdpo_reward_keys"):
        GDPORewardManager(tokenizer, 0)
    with pytest.raises(ConfigError, match=r"gdpo_reward_weights holds 1 numbers for the 2 keys"):
        GDPORewardManager(tokenizer, 0, reward_keys=["a", "b"], reward_weights=[1.0])
    manager = GDPORewardManager(tokenizer, 0, lambda **call: 1.0, reward_keys=["a"])
    _, extra = compute_reward(make_data([("1=", "1", "1")]), manager)
    assert "needs a dict with a" in extra["reward_error"][0]


# ---- limited


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.mark.parametrize(
    ("rpm", "tpm", "times"),
    [
        (2, None, [0, 0, MINUTE, MINUTE, 2 * MINUTE]),
        (None, 250, [0, 0, MINUTE, MINUTE, 2 * MINUTE]),
        (3, 100, [0, MINUTE, 2 * MINUTE, 3 * MINUTE, 4 * MINUTE]),
        (None, None, [0, 0, 0, 0, 0]),
    ],
)
def test_in_any_minute_so_many_begin(rpm: int | None, tpm: int | None, times: list[float]) -> None:
    clock = Clock()
    limiter = RateLimiter(rpm, tpm, 100, lambda: clock.now, clock.sleep)
    begun = []
    for _ in times:
        limiter.admit()
        begun.append(clock.now)
    assert begun == times


def test_the_minute_slides() -> None:
    clock = Clock()
    limiter = RateLimiter(2, None, 1, lambda: clock.now, clock.sleep)
    limiter.admit()
    clock.now = 40.0
    limiter.admit()
    limiter.admit()
    assert clock.now == MINUTE  # a minute after the first, not after the second
    limiter.admit()
    assert clock.now == 40 + MINUTE


@pytest.mark.parametrize("is_async", [False, True])
def test_so_many_run_at_once(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData, is_async: bool
) -> None:
    lock, running, most = threading.Lock(), [0], [0]

    def enter(change: int) -> float:
        with lock:
            running[0] += change
            most[0] = max(most[0], running[0])
        return 1.0

    def plain(**call: Any) -> float:
        enter(1)
        return enter(-1)

    async def later(**call: Any) -> float:
        enter(1)
        await asyncio.sleep(0.01)
        return enter(-1)

    manager = LimitedRewardManager(tokenizer, 0, later if is_async else plain, max_concurrent=2)
    rewards, _ = compute_reward(make_data([("1=", "1", "1")] * 8), manager)
    assert rewards[:, 0].tolist() == [1] * 8
    assert most[0] <= 2
    assert not is_async or most[0] == 2


def test_limits_that_make_no_sense(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = "estimated_tokens_per_request"
    for name, value, shown, takes in [
        ("max_concurrent", 0, "0", "a whole number from 1"),
        ("max_concurrent", 0.5, "0.5", "a whole number from 1"),
        ("max_concurrent", None, "null", "a whole number from 1"),
        (tokens, None, "null", "a whole number from 1"),
        ("max_rpm", -1, "-1", "a number above 0, or null"),
        ("timeout", "x", "'x'", "a number above 0, or null"),
        ("max_tpm", 0, "0", "a number above 0, or null"),
    ]:
        with pytest.raises(ConfigError, match=rf"reward_kwargs\.{name}={shown}: takes {takes}$"):
            LimitedRewardManager(tokenizer, 0, **cast(Any, {name: value}))
    LimitedRewardManager(tokenizer, 0, max_rpm=0.5, max_tpm=None, timeout=None)
    with pytest.raises(ConfigError, match=r"max_tpm=100: .*estimated_tokens_per_request=2000"):
        LimitedRewardManager(tokenizer, 0, max_tpm=100)


def test_the_time_limit_of_its_own(tokenizer: PreTrainedTokenizerFast, make_data: MakeData) -> None:
    async def hang(**call: Any) -> float:
        await asyncio.sleep(10_000)
        return 1.0

    manager = LimitedRewardManager(tokenizer, 0, hang, timeout=0.1)
    _, extra = compute_reward(make_data([("1=", "1", "1")] * 2), manager)
    assert extra["reward_state"] == ["timed_out"] * 2


# ---- verl's newer contract

SINGLE = """
class OfOne:
    def __init__(self, config, tokenizer, compute_score, reward_router_address=None,
                 reward_model_tokenizer=None):
        self.key = config.data.reward_fn_key
        self.tokenizer = tokenizer
        self.compute_score = compute_score
        assert reward_router_address is None and reward_model_tokenizer is None

    async def run_single(self, data):
        assert len(data) == 1
        item = data[0]
        length = int(item.batch["attention_mask"][-3:].sum())
        text = self.tokenizer.decode(item.batch["responses"][:length], skip_special_tokens=True)
        score = self.compute_score(
            data_source=item.non_tensor_batch[self.key], solution_str=text,
            ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
        )
        if text == "4":
            return {"reward_score": None}
        return {"reward_score": score["score"], "reward_extra_info": {"text": text}}
"""


def test_a_class_with_run_single(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData, tmp_path: Path
) -> None:
    (tmp_path / "of_one.py").write_text(SINGLE)
    overrides = [
        "data.reward_fn_key=kind",
        "reward_manager.source=importlib",
        f"reward_manager.module.path={tmp_path / 'of_one.py'}",
        "reward_manager.module.name=OfOne",
    ]
    config = compose_config(overrides, "ppo_trainer", None, PPOTrainerConfig)
    manager = load_reward_manager(config, tokenizer, 0)
    data = make_data(ROWS, kind=["caldera/arithmetic"] * 3)
    rewards, extra = compute_reward(data, manager)
    assert rewards.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert extra["text"] == ["2", None, ""]
    assert extra["reward_error"][1] == "'reward_score' must be a finite number, and is None"
