"""Score functions that a user brings along."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

from caldera.commands.eval import run_eval
from caldera.config.offline import EvaluationConfig
from caldera.config.reward import CustomRewardFunctionConfig
from caldera.errors import CalderaError, ConfigError
from caldera.reward.custom import get_custom_reward_fn

SOURCE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return float(solution_str == ground_truth) + bonus

async def score_later(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return {"score": bonus, "source": data_source}

NOT_A_FUNCTION = 3
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(SOURCE)
    return path


def test_no_path_means_no_function() -> None:
    assert get_custom_reward_fn(CustomRewardFunctionConfig()) is None


def test_a_function_by_path_and_name(source: Path) -> None:
    compute_score = get_custom_reward_fn(CustomRewardFunctionConfig(path=str(source)))
    assert compute_score is not None
    assert compute_score("s", "7", "7") == 1.0
    assert compute_score(data_source="s", solution_str="8", ground_truth="7") == 0.0


def test_reward_kwargs_override_the_arguments_of_the_call(source: Path) -> None:
    config = CustomRewardFunctionConfig(path=f"file://{source}", reward_kwargs={"bonus": 0.5})
    compute_score = get_custom_reward_fn(config)
    assert compute_score is not None
    assert compute_score("s", "7", "7") == 1.5
    assert compute_score("s", "7", "7", bonus=100.0) == 1.5


def test_a_function_of_an_installed_package() -> None:
    config = CustomRewardFunctionConfig(path="pkg://caldera.reward_score.gsm8k")
    compute_score = get_custom_reward_fn(config)
    assert compute_score is not None
    assert compute_score("#### 7", "7") == 1.0


def test_an_async_function(source: Path) -> None:
    config = CustomRewardFunctionConfig(
        path=str(source), name="score_later", reward_kwargs={"bonus": 2.0}
    )
    compute_score = get_custom_reward_fn(config)
    assert compute_score is not None
    assert asyncio.run(compute_score("s", "", "")) == {"score": 2.0, "source": "s"}


def test_another_process_finds_the_function_again(source: Path) -> None:
    config = CustomRewardFunctionConfig(path=str(source), reward_kwargs={"bonus": 0.5})
    compute_score = get_custom_reward_fn(config)
    again = pickle.loads(pickle.dumps(compute_score))
    assert again("s", "7", "7") == 1.5


def test_a_name_that_is_no_function(source: Path) -> None:
    config = CustomRewardFunctionConfig(path=str(source), name="NOT_A_FUNCTION")
    with pytest.raises(ConfigError, match=r"custom_reward_function\.name='NOT_A_FUNCTION'.*int"):
        get_custom_reward_fn(config)


def test_a_name_that_does_not_exist(source: Path) -> None:
    config = CustomRewardFunctionConfig(path=str(source), name="compute_scores")
    with pytest.raises(ConfigError, match=r"custom_reward_function.*compute_score"):
        get_custom_reward_fn(config)


@pytest.mark.parametrize(
    ("source", "kwargs", "told"),
    [
        ("def compute_score(answer): return 1.0", {}, "too many positional arguments"),
        ("def compute_score(*, data_source, solution_str): return 1.0", {}, "too many positional"),
        ("def compute_score(a, b, c): return 1.0", {"weight": 2}, "unexpected keyword .*'weight'"),
        ("def compute_score(a, b, c, d): return 1.0", {}, "missing a required argument: 'd'"),
        ("def compute_score(a, b, c, extra_info=None): return 1.0", {}, None),
        ("def compute_score(*values, weight): return 1.0", {"weight": 2}, None),
    ],
)
def test_evaluation_calls_by_place(
    tmp_path: Path, source: str, kwargs: dict[str, Any], told: str | None
) -> None:
    file = tmp_path / "score.py"
    file.write_text(source)
    answers = tmp_path / "absent.parquet"  # the function is looked at before the answers
    config = EvaluationConfig()
    config.data.path = str(answers)
    config.custom_reward_function.path = str(file)
    config.custom_reward_function.reward_kwargs = kwargs
    with pytest.raises(CalderaError, match=told or "does not exist") as raised:
        run_eval(config)
    assert ("data_source, solution_str, ground_truth" in str(raised.value)) is bool(told)
