"""Score functions in processes: they are ended when they hang, and missed when they are killed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from caldera.errors import ConfigError
from caldera.protocol import DataProto
from caldera.reward import PrimeRewardManager, RemoteRewardManager, compute_reward
from caldera.reward.custom import CustomScore
from caldera.reward.scoring import ScoringLimits

MakeData = Callable[..., DataProto]

SOURCE = """
import asyncio, os, signal, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if solution_str == "1":
        time.sleep(10_000)
    if solution_str == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "3":
        raise ValueError("three\\nis bad")
    if solution_str == "4":
        return lambda: None
    if solution_str == "5":
        os._exit(3)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # only in a main thread
    return {"score": float(solution_str) + bonus, "process": os.getpid()}

async def later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return float(solution_str)
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "my_rewards.py").write_text(SOURCE)
    return str(tmp_path / "my_rewards.py")


def test_whatever_a_process_does_the_others_have_their_scores(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData, source: str
) -> None:
    manager = PrimeRewardManager(tokenizer, 0, CustomScore(source, "compute_score", {"bonus": 0.5}))
    manager.limits = ScoringLimits(timeout=5.0, num_workers=2)
    data = make_data([("1=", answer, "1") for answer in "61728394505"])
    rewards, extra = compute_reward(data, manager)
    expected = [6.5, 0, 7.5, 0, 8.5, 0, 9.5, 0, 0, 0.5, 0]
    assert rewards[:, 0].tolist() == expected
    v, f = "value", "failed"
    assert extra["reward_state"] == [v, "timed_out", v, f, v, f, v, f, f, v, f]
    errors = extra["reward_error"]
    assert errors[1] == "the score function took longer than 5 s"
    assert errors[3] == "the process of the score function was killed by SIGKILL"
    assert errors[5] == "the score function raised ValueError: three (my_rewards.py:10)"
    assert "pickle" in errors[7]
    assert errors[8] == errors[10] == "the process of the score function ended with status 3"


def test_processes_are_kept_between_batches(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData, source: str
) -> None:
    manager = PrimeRewardManager(tokenizer, 0, CustomScore(source, "compute_score"))
    manager.limits = ScoringLimits(num_workers=1)
    data = make_data([("1=", "7", "1")])
    first, second = (compute_reward(data, manager)[1]["process"] for _ in range(2))
    assert first == second


def test_async_functions_are_for_prime_alone(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData, source: str
) -> None:
    later = CustomScore(source, "later")
    rewards, _ = compute_reward(
        make_data([("1=", "7", "1")]), PrimeRewardManager(tokenizer, 0, later)
    )
    assert rewards.tolist() == [[7, 0, 0]]
    with pytest.raises(ConfigError, match=r"reward_manager='remote' takes plain functions"):
        RemoteRewardManager(tokenizer, 0, later)


def test_a_local_function_is_sent_and_one_with_a_lock_is_an_error(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    lock = threading.Lock()

    def local(**call: Any) -> float:
        return 1.0

    def locked(**call: Any) -> float:
        return float(lock.locked())

    data = make_data([("1=", "7", "1")])
    rewards, _ = compute_reward(data, PrimeRewardManager(tokenizer, 0, local))
    assert rewards.tolist() == [[1, 0, 0]]
    with pytest.raises(ConfigError, match=r"cannot be sent .* custom_reward_function\.path"):
        compute_reward(data, PrimeRewardManager(tokenizer, 0, locked))


def test_scorers_by_data_source_run_in_processes_too(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData
) -> None:
    manager = RemoteRewardManager(tokenizer, 0)
    manager.limits = ScoringLimits(num_workers=1)
    rewards, _ = compute_reward(make_data([("1+1=", "2", "2"), ("1+1=", "3", "2")]), manager)
    assert rewards[:, 0].tolist() == [1, 0]
    with pytest.raises(ConfigError, match="no scorer serves"):
        compute_reward(make_data([("1=", "1", "1")], data_source="nowhere"), manager)


def test_a_file_that_only_a_process_cannot_import_is_no_end_of_the_run(
    tokenizer: PreTrainedTokenizerFast, make_data: MakeData, tmp_path: Path
) -> None:
    source = tmp_path / "away.py"
    source.write_text(
        "import multiprocessing\n"
        "if multiprocessing.parent_process() is not None:\n"
        "    raise OSError('away')\n"
        "def compute_score(**call): return 1.0\n"
    )
    manager = PrimeRewardManager(tokenizer, 0, CustomScore(str(source), "compute_score"))
    manager.limits = ScoringLimits(num_workers=1)
    _, extra = compute_reward(make_data([("1=", "7", "1")]), manager)
    assert extra["reward_state"] == ["failed"]
    assert extra["reward_error"][0].endswith(f"OSError: away ({source}:3)")
