"""What the driver does between scores and the update."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from caldera.config import AlgorithmConfig
from caldera.protocol import DataProto, tensors_of
from caldera.trainer.ppo.advantage import (
    compute_advantage,
    correct_rollout,
    resample,
    variance_metrics,
)


def batch_of(old: list[list[float]], sampled: list[list[float]] | None) -> DataProto:
    tensors = {
        "old_log_probs": torch.tensor(old),
        "response_mask": torch.ones(len(old), len(old[0]), dtype=torch.long),
        "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 3.0]]),
        "token_level_scores": torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 3.0]]),
    }
    if sampled is not None:
        tensors["rollout_log_probs"] = torch.tensor(sampled)
    return DataProto.from_dict(tensors, {"uid": np.array(["a", "a", "a"], dtype=object)})


OLD = [[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]]
SAMPLED = [[-1.0, -1.0], [-1.0, -2.0], [-1.0, -6.0]]  # ratios 1 1, 1 e, 1 e^5


def test_the_mismatch_is_always_measured() -> None:
    batch = batch_of(OLD, SAMPLED)
    metrics = correct_rollout(batch, AlgorithmConfig())
    assert metrics["rollout_corr/kl"] == pytest.approx(-(1 + 5) / 6)
    assert metrics["training/rollout_probs_diff_valid"] == 1.0
    assert "rollout_is_weights" not in tensors_of(batch).keys()  # noqa: SIM118 (a TensorDict)
    assert tensors_of(batch)["response_mask"].all()


def test_without_the_samplers_log_probs_there_is_nothing_to_correct() -> None:
    assert correct_rollout(batch_of(OLD, None), AlgorithmConfig()) == {}


def test_bypass_mode_leaves_it_to_the_loss() -> None:
    algorithm = AlgorithmConfig()
    algorithm.rollout_correction.bypass_mode = True
    assert correct_rollout(batch_of(OLD, SAMPLED), algorithm) == {}


def test_weights_and_rejection_are_written_to_the_batch() -> None:
    algorithm = AlgorithmConfig()
    algorithm.rollout_correction.rollout_is = "token"
    algorithm.rollout_correction.rollout_rs = "token_k1"
    algorithm.rollout_correction.rollout_rs_threshold = "0.1_10.0"
    batch = batch_of(OLD, SAMPLED)
    metrics = correct_rollout(batch, algorithm)
    weights = tensors_of(batch)["rollout_is_weights"]
    assert weights.tolist() == [[1.0, 1.0], [1.0, 2.0], [1.0, 2.0]]  # cut at 2
    assert tensors_of(batch)["response_mask"].tolist() == [[1, 1], [1, 1], [1, 0]]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 6)


def test_pf_ppo_draws_rows_by_their_scores() -> None:
    algorithm = AlgorithmConfig(adv_estimator="grpo", use_pf_ppo=True)
    drawn = resample(batch_of(OLD, None), algorithm, step=1)
    again = resample(batch_of(OLD, None), algorithm, step=1)
    scores = tensors_of(drawn)["token_level_scores"].sum(-1)
    assert len(drawn) == 3
    assert 0.0 not in scores.tolist()
    assert torch.equal(scores, tensors_of(again)["token_level_scores"].sum(-1))
    others = [
        tensors_of(resample(batch_of(OLD, None), algorithm, step))["token_level_scores"].sum(-1)
        for step in range(2, 12)
    ]
    assert any(not torch.equal(scores, other) for other in others)


def test_variance_needs_the_sum_of_squared_probabilities() -> None:
    batch = batch_of(OLD, None)
    compute_advantage(batch, AlgorithmConfig(adv_estimator="grpo"))
    assert variance_metrics(batch, 1.0) == {}
    tensors_of(batch)["sum_pi_squared"] = torch.full((3, 2), 0.5)
    assert variance_metrics(batch, None) == {}
    metrics = variance_metrics(batch, 1.0)
    assert metrics["variance_proxy/proxy1_signal_strength"] == pytest.approx(1.0)
    assert metrics["variance_proxy/expected_w"] == pytest.approx(2 * (1.5 - 2 * 2.718281828**-1))
