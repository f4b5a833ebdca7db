"""Answers are scored as they end, and the controller finds their outcomes in the batch."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from caldera.config import PPOTrainerConfig, load_config
from caldera.errors import ConfigError, DataError
from caldera.protocol import DataProto
from caldera.reward import (
    OUTCOMES,
    ROWS,
    NaiveRewardManager,
    StreamingScorer,
    compute_reward,
    load_reward_manager,
    streams,
)
from caldera.reward.scoring import ScoringLimits
from caldera.reward.streaming import StreamedScoring
from caldera.rollout import Completion
from caldera.rollout.batch import completions_to_batch
from caldera.workers.phases import PROMPTS, REWARD_ROWS

Load = Callable[..., PPOTrainerConfig]
ANSWERS = [[2 + 3], [2 + 1, 2 + 3, 1], [2 + 4]]  # "3", "13" with its end, "4"
TRUTHS = ["3", "13", "5"]


@pytest.fixture
def load() -> Load:
    def make(*overrides: str) -> PPOTrainerConfig:
        required = [
            "data.train_files=train.parquet",
            "data.val_files=val.parquet",
            "data.max_response_length=3",
            "actor_rollout_ref.model.path=M",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
            "algorithm.adv_estimator=grpo",
        ]
        return load_config([*required, *overrides])

    return make


def completions() -> list[Completion]:
    return [Completion(tokens, [0.0] * len(tokens), "stop", 0) for tokens in ANSWERS]


def prompts_of(columns: dict[str, list[Any]]) -> DataProto:
    rows = [{key: values[row] for key, values in columns.items()} for row in range(len(ANSWERS))]
    held = np.empty(len(rows), dtype=object)
    held[:] = rows
    return DataProto.from_dict(
        {
            "input_ids": torch.full((3, 2), 5),
            "attention_mask": torch.ones(3, 2, dtype=torch.long),
        },
        {ROWS: held},
        {"pad_token_id": 0},
    )


COLUMNS: dict[str, list[Any]] = {
    "data_source": ["caldera/arithmetic"] * 3,
    "reward_model": [{"ground_truth": truth} for truth in TRUTHS],
    "uid": ["a", "b", "c"],
}


def answers_of(prompts: DataProto) -> DataProto:
    return completions_to_batch(prompts, completions(), 3, 0, False)


def with_columns(answers: DataProto) -> DataProto:
    for key, values in COLUMNS.items():
        answers.non_tensor_batch[key] = np.array(values, dtype=object)
    return answers


def stream(scoring: StreamedScoring, order: Sequence[int]) -> None:
    """All responses, in this order."""
    with scoring:
        for place in order:
            scoring.on_finished(place, completions()[place])


def test_the_worker_is_sent_what_scoring_needs() -> None:
    assert ROWS == REWARD_ROWS and ROWS in PROMPTS


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_rewards_are_those_of_scoring_afterwards(
    tokenizer: PreTrainedTokenizerFast, load: Load, order: Sequence[int]
) -> None:
    config = load("reward_model.reward_manager=dapo", "+reward_model.reward_kwargs.overlong_buffer_"
                  "cfg={enable: true, len: 2, penalty_factor: 1, log: true}")  # fmt: skip
    make_scorer = pickle.loads(pickle.dumps(partial(StreamingScorer, config, tokenizer)))
    prompts = prompts_of(COLUMNS)
    scoring = make_scorer(0).begin(prompts)
    stream(scoring, order)
    streamed = with_columns(scoring.join(answers_of(prompts)))
    assert set(streamed.meta_info["metrics"]) == {"reward_sampling", "reward_wait"}
    assert all(outcome is not None for outcome in streamed.non_tensor_batch[OUTCOMES])
    later = with_columns(answers_of(prompts))
    rewards, extra = compute_reward(streamed, load_reward_manager(config, tokenizer, 0))
    expected = compute_reward(later, load_reward_manager(config, tokenizer, 0))
    assert torch.equal(rewards, expected[0])
    assert extra == expected[1] and extra["overlong_reward"] == [0.0, -1.0, 0.0]


def test_a_response_is_scored_while_others_are_sampled(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    scored = threading.Event()

    def tell(solution_str: str, **call: Any) -> float:
        if solution_str == "3":
            scored.set()
        return 1.0

    manager = NaiveRewardManager(tokenizer, 0, tell)
    prompts = prompts_of(COLUMNS)
    scoring = StreamedScoring(manager, prompts, 3, patience=30)
    with scoring:
        scoring.on_finished(0, completions()[0])
        assert scored.wait(30), "the others end only after this"
        scoring.on_finished(1, completions()[1])
        scoring.on_finished(2, completions()[2])
    outcomes = scoring.join(answers_of(prompts)).non_tensor_batch[OUTCOMES]
    assert [outcome.score for outcome in outcomes] == [1.0] * 3


def test_what_is_not_scored_in_time_is_left_to_the_controller(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """A rank that is silent for too long would be taken for dead."""
    release = threading.Event()

    def slow(solution_str: str, **call: Any) -> float:
        if solution_str == "13":
            assert release.wait(30)
        return float(solution_str)

    manager = NaiveRewardManager(tokenizer, 0, slow)
    prompts = prompts_of(COLUMNS)
    scoring = StreamedScoring(manager, prompts, 3, patience=3.0)
    stream(scoring, [0, 1, 2])
    answers = with_columns(scoring.join(answers_of(prompts)))
    outcomes = answers.non_tensor_batch[OUTCOMES]
    assert outcomes[1] is None
    assert (outcomes[0].score, outcomes[2].score) == (3.0, 4.0)  # beside the one that hangs
    release.set()
    rewards, _ = compute_reward(answers, NaiveRewardManager(tokenizer, 0, slow))
    assert rewards.sum(-1).tolist() == [3, 13, 4]


def test_time_that_sampling_took_is_not_waited_again(tokenizer: PreTrainedTokenizerFast) -> None:
    release = threading.Event()
    manager = NaiveRewardManager(tokenizer, 0, lambda **call: release.wait(60))
    prompts = prompts_of(COLUMNS)
    scoring = StreamedScoring(manager, prompts, 3, patience=600)
    scoring._begun -= 600  # seconds of sampling
    stream(scoring, [0, 1, 2])
    answers = scoring.join(answers_of(prompts))
    assert not release.is_set()
    release.set()
    assert answers.non_tensor_batch[OUTCOMES].tolist() == [None] * 3
    assert answers.meta_info["metrics"]["reward_sampling"] >= 600


def test_nothing_is_left_of_sampling_that_fails(tokenizer: PreTrainedTokenizerFast) -> None:
    scoring = StreamedScoring(NaiveRewardManager(tokenizer, 0), prompts_of(COLUMNS), 3, patience=30)
    with pytest.raises(OSError, match="no memory"), scoring:
        raise OSError("no memory")
    assert scoring._fed.result(30) == {}, "its thread still waits for responses"


def test_failures_come_back_as_outcomes(tokenizer: PreTrainedTokenizerFast) -> None:
    def fail(solution_str: str, **call: Any) -> Any:
        inverse = 1 / (int(solution_str) - 3)
        return {"score": inverse, "call": lambda: 0} if solution_str == "4" else inverse

    manager = NaiveRewardManager(tokenizer, 0, fail)
    manager.limits = ScoringLimits(timeout=30)
    prompts = prompts_of(COLUMNS)
    scoring = StreamedScoring(manager, prompts, 3, patience=30)
    stream(scoring, [1, 2, 0])
    outcomes = scoring.join(answers_of(prompts)).non_tensor_batch[OUTCOMES]
    assert [outcome.state for outcome in outcomes] == ["failed", "value", "failed"]
    assert "ZeroDivisionError" in outcomes[0].error
    assert "cannot be sent to another process" in outcomes[2].error
    assert pickle.loads(pickle.dumps(list(outcomes))) == list(outcomes)


@pytest.mark.parametrize(
    ("columns", "error", "said"),
    [
        ({"uid": COLUMNS["uid"], "data_source": ["x"] * 3}, DataError, "column 'reward_model'"),
        (COLUMNS | {"data_source": ["nowhere"] * 3}, ConfigError, "no scorer serves"),
    ],
)
def test_a_mistake_in_the_data_is_told_by_the_controller(
    tokenizer: PreTrainedTokenizerFast,
    columns: dict[str, list[Any]],
    error: type[Exception],
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = prompts_of(columns)
    scoring = StreamedScoring(NaiveRewardManager(tokenizer, 0), prompts, 3, patience=30)
    stream(scoring, [0, 1, 2])
    answers = scoring.join(answers_of(prompts))
    assert answers.non_tensor_batch[OUTCOMES].tolist() == [None] * 3
    assert any("left to the controller" in m and said in m for m in caplog.messages)
    for key, values in columns.items():
        answers.non_tensor_batch[key] = np.array(values, dtype=object)
    with pytest.raises(error, match=said):
        compute_reward(answers, NaiveRewardManager(tokenizer, 0))


def test_which_runs_stream(tokenizer: PreTrainedTokenizerFast, load: Load, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from caldera.reward import NaiveRewardManager\n"
        "class Own(NaiveRewardManager):\n"
        "    def __call__(self, data, return_dict=False):\n"
        "        return super().__call__(data, return_dict)\n"
        "class Sample(NaiveRewardManager):\n"
        "    pass\n"
        "def compute_score(**call):\n"
        "    return 0.0\n"
    )
    by_file = ("reward_manager.source=importlib", f"reward_manager.module.path={own}")
    two_ranks = "trainer.n_gpus_per_node=2"
    limited = "reward_model.reward_manager=limited"
    for overrides, expected in [
        ((), True),
        (("reward.streaming=False",), False),
        (("reward_model.reward_manager=prime", two_ranks), True),
        (("reward_model.reward_manager=batch", f"custom_reward_function.path={own}"), False),
        ((limited,), True),
        ((limited, two_ranks), False),
        ((*by_file, "reward_manager.module.name=Own"), False),
        ((*by_file, "reward_manager.module.name=Sample"), True),
    ]:
        config = load(*overrides)
        manager = load_reward_manager(config, tokenizer, 0)
        assert streams(config, manager) is expected, overrides
