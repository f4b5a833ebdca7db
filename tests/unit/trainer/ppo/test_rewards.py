"""Samples that could not be scored: as if they had not been sampled, or scored 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from caldera.config import AlgorithmConfig, PPOTrainerConfig
from caldera.core_algos import FixedKLController
from caldera.errors import RewardError
from caldera.protocol import DataProto, tensors_of
from caldera.reward import OUTCOMES
from caldera.trainer.ppo.advantage import (
    apply_kl_penalty,
    compute_advantage,
    correct_rollout,
    resample,
    rewarded_part,
    scatter_rows,
)
from caldera.trainer.ppo.metrics import compute_data_metrics
from caldera.trainer.ppo.rewards import (
    FirstScores,
    component_metrics,
    failure_metrics,
    record_scores,
    takes_part,
    waited_for_rewards,
)

UIDS = list("aaaabbbbcccc")
FAILED = [2, 5, 6]  # of a one, of b two
ROWS, WIDTH, PROMPT = len(UIDS), 5, 2


def whole_batch() -> DataProto:
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=draw)
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()  # (B, R)

    def drawn() -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, generator=draw) * mask

    scores = torch.zeros(ROWS, WIDTH)
    scores[torch.arange(ROWS), lengths - 1] = torch.randn(ROWS, generator=draw)
    tensors = {
        "token_level_scores": scores,
        "responses": torch.ones(ROWS, WIDTH, dtype=torch.long),
        "attention_mask": torch.cat([torch.ones(ROWS, PROMPT, dtype=torch.long), mask], 1),
        "response_mask": mask,
        "old_log_probs": drawn() - 2,
        "rollout_log_probs": drawn() - 2,
        "ref_log_prob": drawn() - 2,
        "values": drawn(),
        "sum_pi_squared": drawn().sigmoid(),
        "reward_baselines": torch.randn(3, generator=draw).repeat_interleave(4),
        "has_reward": torch.tensor([row not in FAILED for row in range(ROWS)]),
    }
    tensors["token_level_scores"][FAILED] = 0.0
    parts = {key: np.array(scores.sum(-1).tolist(), dtype=object) for key in ("one", "two")}
    parts["one"][FAILED] = None
    columns = {"uid": np.array(UIDS, dtype=object), **parts}
    return DataProto.from_dict(tensors, columns)


def without_failed(batch: DataProto) -> DataProto:
    """The batch of a run in which they were never sampled."""
    return batch.select_idxs([row for row in range(ROWS) if row not in FAILED])


def algorithm_of(estimator: str, **settings: Any) -> AlgorithmConfig:
    made = AlgorithmConfig(adv_estimator=estimator, gamma=0.9, lam=0.8, use_kl_in_reward=True)
    made.gdpo_reward_keys = ["one"]
    made.rollout_correction.rollout_is = "sequence"
    made.rollout_correction.rollout_is_batch_normalize = True
    made.rollout_correction.rollout_rs = "token_k1"
    made.rollout_correction.rollout_rs_threshold = "0.1_10.0"
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def advance(batch: DataProto, algorithm: AlgorithmConfig) -> dict[str, float]:
    """What the trainer does between scores and the update."""
    metrics: dict[str, float] = {}
    part, rows = rewarded_part(batch, algorithm)
    if len(part):
        metrics |= apply_kl_penalty(part, algorithm, FixedKLController(0.1))
        metrics |= correct_rollout(part, algorithm)
        compute_advantage(part, algorithm)
    scatter_rows(part, rows, batch)
    return metrics


@pytest.mark.parametrize(
    "estimator",
    [
        "gae", "grpo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax",
        "rloo", "rloo_vectorized", "opo", "gpg", "maxrl", "gdpo", "optimal_token_baseline",
        "tir_optimal_token_baseline",
    ],
)  # fmt: skip
def test_rows_without_a_reward_are_as_if_never_sampled(estimator: str) -> None:
    batch, other = whole_batch(), without_failed(whole_batch())
    assert tensors_of(other)["has_reward"].all()
    algorithm = algorithm_of(estimator)
    metrics, expected = advance(batch, algorithm), advance(other, algorithm)
    assert metrics == expected
    assert metrics["actor/reward_kl_penalty"] != 0
    kept = tensors_of(batch)["has_reward"]
    for key in ("token_level_rewards", "advantages", "returns", "response_mask"):
        assert torch.equal(tensors_of(batch)[key][kept], tensors_of(other)[key]), key
        assert (tensors_of(batch)[key][~kept] == 0).all(), key
    weights = tensors_of(batch)["rollout_is_weights"][kept]
    assert torch.equal(weights, tensors_of(other)["rollout_is_weights"])
    assert tensors_of(batch)["advantages"].abs().sum() > 0
    keys = ("critic/score", "critic/rewards", "critic/advantages", "critic/returns")
    ours, theirs = (compute_data_metrics(data, use_critic=True) for data in (batch, other))
    assert {k: v for k, v in ours.items() if k.startswith(keys)} == {
        k: v for k, v in theirs.items() if k.startswith(keys)
    }


def test_without_failures_nothing_is_copied() -> None:
    batch = without_failed(whole_batch())
    part, rows = rewarded_part(batch, algorithm_of("grpo"))
    assert part is batch and rows.all()


def test_an_answer_that_failures_left_alone_leads_nobody() -> None:
    batch = whole_batch()
    tensors_of(batch)["has_reward"][:] = torch.tensor([True] * 5 + [False] * 3 + [True] * 4)
    advance(batch, algorithm_of("grpo_passk"))
    assert not tensors_of(batch)["response_mask"][4:8].any()
    assert tensors_of(batch)["advantages"][:4].any()


def test_a_step_in_which_everything_failed() -> None:
    batch = whole_batch()
    tensors_of(batch)["has_reward"][:] = False
    assert advance(batch, algorithm_of("grpo")) == {}
    for key in ("token_level_rewards", "advantages", "returns", "response_mask"):
        assert tensors_of(batch)[key].shape == (ROWS, WIDTH)
        assert not tensors_of(batch)[key].any()
    metrics = compute_data_metrics(batch, use_critic=True)
    assert metrics["critic/score/mean"] == metrics["critic/advantages/max"] == 0.0


def test_a_prompt_whose_greedy_answer_has_no_reward_has_no_remax_baseline() -> None:
    batch = whole_batch()
    tensors_of(batch)["reward_baselines"][4:8] = torch.nan
    advance(batch, algorithm_of("remax"))
    assert tensors_of(batch)["advantages"].isfinite().all()
    assert not tensors_of(batch)["response_mask"][4:8].any()


def test_pf_ppo_draws_among_the_rows_that_have_a_reward() -> None:
    batch = whole_batch()
    batch.non_tensor_batch["row"] = np.arange(ROWS)
    algorithm = algorithm_of("gae", use_pf_ppo=True)
    advance(batch, algorithm)
    drawn = resample(batch, algorithm, step=1)
    rows = drawn.non_tensor_batch["row"]
    assert rows[FAILED].tolist() == FAILED
    others = np.delete(rows, FAILED)
    assert len(drawn) == ROWS and not set(others) & set(FAILED)
    assert len(set(others)) < len(others)


# ---- recording


def config_of(on_failure: str, keys: list[str] | None = None) -> PPOTrainerConfig:
    config = PPOTrainerConfig()
    config.reward.on_failure = on_failure
    if keys:
        config.algorithm.adv_estimator = "gdpo"
        config.algorithm.gdpo_reward_keys = keys
    return config


def recorded(
    extras: dict[str, list[Any]], on_failure: str = "mask", keys: list[str] | None = None
) -> DataProto:
    count = len(next(iter(extras.values())))
    batch = DataProto.from_dict(
        {"responses": torch.ones(count, 2)}, {OUTCOMES: np.array([None] * count, dtype=object)}
    )
    record_scores(batch, torch.zeros(count, 2), extras, config_of(on_failure, keys))
    return batch


def test_failures_are_masked_or_scored_0() -> None:
    extras: dict[str, list[Any]] = {
        "acc": [1, None, None],
        "reward_state": ["value", "failed", "timed_out"],
    }
    batch = recorded(dict(extras))
    assert tensors_of(batch)["has_reward"].tolist() == [True, False, False]
    assert OUTCOMES not in batch.non_tensor_batch
    assert batch.non_tensor_batch["acc"].tolist() == [1, None, None]
    assert tensors_of(recorded(dict(extras), "zero"))["has_reward"].all()
    assert takes_part({}, 2, config_of("mask")).tolist() == [True, True]


def test_what_is_counted() -> None:
    assert failure_metrics(["value", "failed", "timed_out", "failed", None]) == {
        "reward/failed": 2.0,
        "reward/timed_out": 1.0,
        "reward/failure_rate": 3 / 5,
    }


NONE_SCORED = {"reward_state": ["timed_out", "failed"], "reward_error": ["too late", "x"]}
ONE_SCORED = {"reward_state": ["failed", "value"], "reward_error": ["x", None]}
SECOND_BATCH_SCORED = {"reward_state": ["failed", None], "reward_error": ["x", None]}


@pytest.mark.parametrize("on_failure", ["mask", "zero"])
def test_a_run_whose_first_answers_cannot_be_scored_ends(on_failure: str) -> None:
    config = config_of(on_failure)
    told = r"^none of the first 2 responses could be scored, .* The first: too late$"
    with pytest.raises(RewardError, match=told):
        FirstScores(config).check(NONE_SCORED)
    config.custom_reward_function.path = "mine.py"
    with pytest.raises(RewardError, match=r"too late\n  score function: compute_score of mine.py$"):
        FirstScores(config).check(NONE_SCORED)


@pytest.mark.parametrize("first", [{}, {"acc": [1.0]}, ONE_SCORED, SECOND_BATCH_SCORED])
def test_later_answers_that_cannot_be_scored_are_data(first: dict[str, list[Any]]) -> None:
    scores = FirstScores(config_of("mask"))
    scores.check(first)
    scores.check(NONE_SCORED)


def test_a_sample_without_one_of_gdpos_rewards_has_failed() -> None:
    extras: dict[str, list[Any]] = {"one": [1.0, "x", 3, 4], "two": [1.0, 2.0, None, True]}
    batch = recorded(extras, keys=["one", "two"])
    assert tensors_of(batch)["has_reward"].tolist() == [True, False, False, True]
    assert batch.non_tensor_batch["reward_error"].tolist() == [
        None,
        "the reward 'one' must be a finite number, and is 'x'",
        "the reward 'two' must be a finite number, and is None",
        None,
    ]
    metrics = component_metrics(batch, config_of("mask", ["one", "two"]))
    assert metrics["gdpo/one/mean"] == 2.5 and metrics["gdpo/one/std"] == pytest.approx(4.5**0.5)
    assert (metrics["gdpo/two/max"], metrics["gdpo/two/min"]) == (1.0, 1.0)


def test_gdpos_rewards_of_a_sample_that_is_scored_0() -> None:
    extras: dict[str, list[Any]] = {
        "one": [1.0, None], "reward_state": ["value", "failed"], "reward_error": [None, "x"]
    }  # fmt: skip
    batch = recorded(extras, "zero", ["one"])
    assert tensors_of(batch)["has_reward"].all()
    assert batch.non_tensor_batch["one"].tolist() == [1.0, 0.0]
    assert component_metrics(batch, config_of("zero", ["one"]))["gdpo/one/mean"] == 0.5


def test_gdpos_rewards_of_a_batch_that_failed_as_a_whole() -> None:
    extras = {"reward_state": ["failed", "timed_out"], "reward_error": ["x", "y"]}
    batch = recorded(extras, "zero", ["one", "two"])
    assert batch.non_tensor_batch["one"].tolist() == [0.0, 0.0]
    assert batch.non_tensor_batch["two"].tolist() == [0.0, 0.0]
    # Those that some function gave are no different if all of them are nonsense.
    batch = recorded({"one": ["x", None]}, "zero", ["one", "two"])
    assert batch.non_tensor_batch["reward_state"].tolist() == ["failed", "failed"]
    assert batch.non_tensor_batch["two"].tolist() == [0.0, 0.0]


def test_other_estimators_have_no_components() -> None:
    assert component_metrics(recorded({"one": [1.0]}), config_of("mask")) == {}


def test_waiting_for_scores_is_not_sampling() -> None:
    waits = {"reward_sampling": [9.0, 4.0, 8.0], "reward_wait": [0.5, 5.0, 3.0]}
    answers = DataProto(meta_info={"metrics": waits})
    timing = {"gen": 11.0, "reward": 1.0}
    waited_for_rewards(answers, timing)
    # The last rank was done 11 s after the beginning, and sampling took 9.
    assert timing == {"gen": 9.0, "reward": 3.0}
    assert answers.meta_info == {}
    waited_for_rewards(DataProto(), timing)
    assert timing == {"gen": 9.0, "reward": 3.0}
    alone = {"reward_sampling": 4.0, "reward_wait": 2.0}
    waited_for_rewards(DataProto(meta_info={"metrics": alone}), timing)
    assert timing == {"gen": 7.0, "reward": 5.0}
