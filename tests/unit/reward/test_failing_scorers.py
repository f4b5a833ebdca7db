"""Whatever a score function does in a thread of the run, its sample has failed and others go on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from caldera.errors import RewardError
from caldera.protocol import DataProto
from caldera.reward import NaiveRewardManager, compute_reward, samples
from caldera.reward.scoring import CallTimeout, ScoringLimits, ThreadScoring, in_a_queue
from caldera.tracking.dumps import json_line

MakeData = Callable[..., DataProto]


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Stop(BaseException):
    pass


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise Stop


class Farewell(Exception):
    def __str__(self) -> str:
        os._exit(3)


class Interrupting(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class Fleeting(Exception):
    @property
    def __traceback__(self) -> None:  # type: ignore[override]
        os._exit(3)


def throw_noted() -> Any:
    error = ValueError("said")
    error.__notes__ = Ending()  # type: ignore[assignment]
    raise error from Farewell()


class Hidden(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no name")


class NamelessError(Exception, metaclass=Hidden):
    pass


class Untraceable(Exception):
    @property
    def __traceback__(self) -> None:  # type: ignore[override]
        raise RuntimeError("no traceback")


class Leaving(dict[str, float]):
    def items(self) -> Any:
        os._exit(3)


class Ending:
    def __repr__(self) -> str:
        os._exit(3)


class Falsy(Exception):
    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")


class Nameless:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Proxy:
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError("bound to nothing")


class Disguised:
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        os._exit(3)


def throw(error: BaseException) -> Any:
    raise error


def recurse(depth: int = 0) -> int:
    return recurse(depth + 1) + 1


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (lambda: throw(Silent()), "Silent: <Silent whose text raises RuntimeError>"),
        (lambda: throw(Falsy("said")), "Falsy: said"),
        (lambda: throw(Unspeakable()), "Unspeakable: <Unspeakable whose text raises Stop>"),
        (lambda: throw(Farewell()), "Farewell: <Farewell whose text raises SystemExit>"),
        (lambda: throw(Interrupting()), "<Interrupting whose text raises KeyboardInterrupt>"),
        (lambda: throw(Fleeting()), "Fleeting"),
        (throw_noted, "ValueError: said"),
        (Disguised, "it called os._exit(3)"),
        (lambda: throw(NamelessError("said")), "NamelessError: said"),
        (lambda: throw(Untraceable("said")), "Untraceable"),
        (lambda: Leaving(score=1.0), "it called os._exit(3)"),
        (Ending, "<Ending whose text raises SystemExit>"),
        (lambda: throw(KeyboardInterrupt()), "KeyboardInterrupt"),
        (lambda: throw(SystemExit(3)), "SystemExit: 3"),
        (lambda: os._exit(3), "it called os._exit(3)"),
        (lambda: throw(MemoryError()), "MemoryError"),
        (recurse, "RecursionError"),
        (lambda: throw(ValueError("\ud800 alone")), r"ValueError: \ud800 alone"),
        (lambda: throw(ValueError("x" * 10**6)), "x..."),
        (lambda: 10**400, "must be a finite number"),
        (lambda: {"score": 10**5000}, "must be a finite number"),
        (lambda: 1j, "must be a finite number, and is 1j"),
        (lambda: np.complex64(1), "must be a finite number"),
        (Nameless, "<Nameless whose text raises RuntimeError>"),
        (Proxy, "RuntimeError: bound to nothing"),
    ],
)
def test_a_sample_fails_and_the_others_are_scored(
    tokenizer: PreTrainedTokenizerFast,
    make_data: MakeData,
    act: Callable[[], Any],
    problem: str,
    is_async: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(samples, "_traceback_is_shown", threading.Event())

    def compute_score(solution_str: str, **call: Any) -> Any:
        return act() if solution_str == "2" else 1.0

    async def compute_later(solution_str: str, **call: Any) -> Any:
        return act() if solution_str == "2" else 1.0

    manager = NaiveRewardManager(tokenizer, 0, compute_later if is_async else compute_score)
    manager.limits = ScoringLimits(timeout=60.0)
    data = make_data([("1=", answer, "1") for answer in "123"])
    rewards, extra = compute_reward(data, manager)
    assert rewards[:, 0].tolist() == [1, 0, 1]
    assert extra["reward_state"] == ["value", "failed", "value"]
    assert problem in extra["reward_error"][1]
    assert problem in caplog.text and caplog.text.encode()  # which a log can hold
    assert len(extra["reward_error"][1]) < 1000
    extra["reward_error"][1].encode()


@pytest.mark.parametrize("score", [True, np.bool_(True), np.float16(1), np.array(1.0), 1])
def test_scores_that_are_numbers_of_some_kind(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData, score: Any
) -> None:
    manager = NaiveRewardManager(tokenizer, 0, lambda **call: score)
    rewards, extra = compute_reward(make_data([("1=", "1", "1")]), manager)
    assert rewards[0, 0] == 1 and extra == {"acc": [1]}


def test_what_files_and_metrics_cannot_hold_is_recorded_as_text(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    said = {"score": 1.0, "big": 10**400, "set": {1}, "day": date(2024, 1, 2), ("a",): {(1,): 2}}
    manager = NaiveRewardManager(tokenizer, 0, lambda **call: said | {"list": np.arange(2)})
    rewards, extra = compute_reward(make_data([("1=", "1", "1")]), manager)
    assert rewards[0, 0] == 1
    assert extra["set"] == ["{1}"] and extra["day"] == ["datetime.date(2024, 1, 2)"]
    assert extra["('a',)"] == ["{(1,): 2}"]
    assert isinstance(extra["big"][0], str) and len(extra["big"][0]) <= 503
    assert extra["list"][0].tolist() == [0, 1]
    json_line({name: values[0] for name, values in extra.items()})


def test_lone_surrogates_are_recorded_as_escapes(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData, capfd: pytest.CaptureFixture[str]
) -> None:
    """A scorer gets them of an answer by `json.loads`."""
    said = {"score": 1.0, "pred": "\ud800", "list": ["\ud801"], "\ud802": 1}
    manager = NaiveRewardManager(tokenizer, 1, lambda **call: said)
    _, extra = compute_reward(make_data([("1=", "1", "1")]), manager)
    assert extra["pred"] == [r"\ud800"] and extra[r"\ud802"] == [1]
    json_line(extra).encode()
    assert r"[pred] \ud800" in capfd.readouterr().out


class Own:
    """A reward manager of the user's."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        return self.act()


def test_a_custom_manager_that_ends_the_process_fails_its_batch(make_data: MakeData) -> None:
    rewards, extra = compute_reward(make_data([("1=", "1", "1")]), Own(lambda: os._exit(3)))
    assert rewards.tolist() == [[0, 0, 0]] and extra["reward_state"] == ["failed"]
    assert "it called os._exit(3)" in extra["reward_error"][0]


@pytest.mark.parametrize(
    ("rewards", "extras", "said"),
    [
        (torch.zeros(2), {}, r"reward_tensor of shape \(2,\), where the responses have \(2, 3\)"),
        (torch.zeros(1, 3), {}, r"shape \(1, 3\)"),
        (torch.zeros(2, 3), {"acc": 1.0}, r"reward_extra_info\['acc'\]=1.0: it takes a list"),
        (torch.zeros(2, 3), {"acc": [1.0]}, "an item for each of the 2 responses"),
        (torch.zeros(2, 3), {"reward_state": ["value"]}, "an item for each of the 2 responses"),
    ],
)
def test_a_custom_manager_is_told_of_wrong_sizes(
    make_data: MakeData, rewards: torch.Tensor, extras: dict[str, Any], said: str
) -> None:
    result = {"reward_tensor": rewards, "reward_extra_info": extras}
    data = make_data([("1=", "1", "1"), ("1=", "2", "1")])
    with pytest.raises(RewardError, match=said):
        compute_reward(data, Own(lambda: result))


def test_a_fork_of_a_score_function_may_exit() -> None:
    def forks(**call: Any) -> int:
        child = os.fork()
        if child == 0:
            os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert ThreadScoring(forks, 60.0).submit({}, "row 0").result() == 7


def test_calls_that_hang_do_not_wait_for_each_other() -> None:
    """Each waits for all of them, and one thread has to do: they all end if they overlap."""
    hanging = threading.Barrier(8)

    def hang(row: int) -> int:
        if row % 2:
            hanging.wait(60)
        return row

    scoring = ThreadScoring(hang, 300.0, num_workers=1)
    futures = [scoring.submit({"row": row}, f"row {row}") for row in range(16)]
    assert [future.result() for future in futures] == list(range(16))


def test_time_in_a_queue_is_not_that_of_the_call() -> None:
    def score(counted: float) -> str:
        with in_a_queue() as count:
            time.sleep(0.5)
            count(counted)
        if counted:
            threading.Event().wait(60)
        return "scored"

    scoring = ThreadScoring(score, timeout=0.2)
    assert scoring.submit({"counted": 0.0}, "row 0").result() == "scored"
    with pytest.raises(CallTimeout):
        scoring.submit({"counted": 0.5}, "row 1").result()


def test_a_slow_first_call_is_waited_for() -> None:
    """It may load what the others use."""
    running, most = 0, 0
    lock = threading.Lock()
    begun = threading.Event()

    def load(row: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if row == 0:
            begun.wait(1.0)
        with lock:
            running -= 1
        return row

    scoring = ThreadScoring(load, 300.0, num_workers=1)
    futures = [scoring.submit({"row": row}, f"row {row}") for row in range(4)]
    assert [future.result() for future in futures] == [0, 1, 2, 3]
    assert most == 1
