"""What the engine minimises, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from caldera.config import ActorConfig, CriticConfig
from caldera.config.actor import PolicyLossConfig
from caldera.config.rollout_correction import RolloutCorrectionConfig
from caldera.core_algos import LossScale, register_policy_loss
from caldera.engine import Outputs
from caldera.protocol import DataProto
from caldera.workers.losses import policy_loss, value_loss

MASK = torch.tensor([[1, 1], [1, 0]])
SCALE = LossScale.from_mask(MASK)


def actor(**keys: object) -> ActorConfig:
    return ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.2, **keys)  # type: ignore[arg-type]


def rows(**extra: list[list[float]]) -> DataProto:
    tensors = {name: torch.tensor(values) for name, values in extra.items()}
    return DataProto.from_dict({"response_mask": MASK, **tensors})


def test_off_policy_the_ratio_counts() -> None:
    log_probs = torch.tensor([[math.log(1.1), 0.0], [math.log(1.5), 9.0]])
    data = rows(old_log_probs=[[0.0, 0.0], [0.0, 0.0]], advantages=[[1.0, 2.0], [1.0, 9.0]])
    loss, metrics = policy_loss(actor(), on_policy=False)({"log_probs": log_probs}, data, SCALE)
    # Ratios 1.1, 1 and 1.5, of which the last is clipped to 1.2.
    assert loss.item() == pytest.approx(-(1.1 + 2 + 1.2) / 3)
    assert metrics["actor/pg_loss"].item() == pytest.approx(loss.item())
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(1 / 3)


def test_on_policy_the_ratio_is_one_and_has_a_gradient() -> None:
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, 9.0]], requires_grad=True)
    data = rows(old_log_probs=[[5.0, 5.0], [5.0, 5.0]], advantages=[[1.0, 2.0], [-3.0, 9.0]])
    loss, metrics = policy_loss(actor(), on_policy=True)({"log_probs": log_probs}, data, SCALE)
    assert loss.item() == 0.0  # -(1 + 2 - 3) / 3
    assert metrics["actor/ppo_kl"].item() == 0.0
    loss.backward()
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-1.0, -2.0], [3.0, 0.0]]) / 3)


def test_entropy_and_kl() -> None:
    config = actor(entropy_coeff=0.5, use_kl_loss=True, kl_loss_coef=2.0, kl_loss_type="kl")
    outputs: Outputs = {
        "log_probs": torch.tensor([[-1.0, -1.0], [-1.0, 9.0]]),
        "entropy": torch.tensor([[0.3, 0.6], [0.9, 99.0]]),
    }
    data = rows(
        old_log_probs=[[-1.0, -1.0], [-1.0, 9.0]],
        ref_log_prob=[[-1.5, -1.0], [-2.0, 99.0]],
        advantages=[[1.0, 1.0], [1.0, 99.0]],
    )
    loss, metrics = policy_loss(config, on_policy=False)(outputs, data, SCALE)
    assert metrics["actor/entropy_loss"].item() == pytest.approx(0.6)
    assert metrics["actor/kl_loss"].item() == pytest.approx(0.5)  # (0.5 + 0 + 1) / 3
    assert metrics["actor/pg_loss"].item() == pytest.approx(-1)
    assert loss.item() == pytest.approx(-1 - 0.5 * 0.6 + 2 * 0.5)


def test_the_full_kl_is_the_engine_s() -> None:
    config = actor(use_kl_loss=True, kl_loss_coef=2.0, kl_loss_type="full")
    log_probs = torch.zeros(2, 2)
    full_kl = torch.tensor([[0.1, 0.2], [0.6, 99.0]], requires_grad=True)
    data = rows(old_log_probs=[[0.0, 0.0]] * 2, advantages=[[0.0, 0.0]] * 2)
    outputs: Outputs = {"log_probs": log_probs, "full_kl": full_kl}
    loss, metrics = policy_loss(config, on_policy=False)(outputs, data, SCALE)
    assert metrics["actor/kl_loss"].item() == pytest.approx(0.3)
    assert loss.item() == pytest.approx(0.6)
    loss.backward()
    assert full_kl.grad is not None
    torch.testing.assert_close(full_kl.grad, torch.tensor([[2.0, 2.0], [2.0, 0.0]]) / 3)


def test_weights_of_rollout_correction() -> None:
    data = rows(
        old_log_probs=[[0.0, 0.0]] * 2,
        advantages=[[1.0, 2.0], [1.0, 9.0]],
        rollout_is_weights=[[0.5, 1.5], [2.0, 9.0]],
    )
    outputs: Outputs = {"log_probs": torch.zeros(2, 2)}
    loss, _ = policy_loss(actor(), on_policy=False)(outputs, data, SCALE)
    assert loss.item() == pytest.approx(-(0.5 + 3.0 + 2.0) / 3)


def test_in_bypass_mode_the_sampler_s_log_probs_are_the_old_ones() -> None:
    """Even where an update is on policy: the ratio is that to the sampler."""
    correction = RolloutCorrectionConfig(bypass_mode=True, loss_type="ppo_clip")
    mode = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=correction)
    config = actor(policy_loss=mode)
    data = rows(old_log_probs=[[0.0, 0.0], [0.0, 0.0]], advantages=[[1.0, 2.0], [1.0, 9.0]])
    outputs: Outputs = {"log_probs": torch.tensor([[math.log(1.1), 0.0], [math.log(1.5), 9.0]])}
    loss, _ = policy_loss(config, on_policy=True)(outputs, data, SCALE)
    assert loss.item() == pytest.approx(-(1.1 + 2 + 1.2) / 3)


def test_rejected_tokens_do_not_count() -> None:
    """Where rejection has rewritten the mask, the mini-batch's counts are those of what is left."""
    mask = torch.tensor([[1, 0], [1, 0]])
    tensors = {
        "response_mask": mask,
        "old_log_probs": torch.zeros(2, 2),
        "advantages": torch.tensor([[1.0, 5.0], [2.0, 9.0]]),
    }
    data = DataProto.from_dict(tensors)
    loss_fn = policy_loss(actor(), on_policy=False)
    loss, _ = loss_fn({"log_probs": torch.zeros(2, 2)}, data, LossScale.from_mask(mask))
    assert loss.item() == pytest.approx(-1.5)


def test_a_loss_of_one_s_own_without_scale() -> None:
    """With verl's signature: means over the micro-batch, which are weighed by its tokens."""

    @register_policy_loss("plain_mean")
    def plain_mean(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str,
        config: ActorConfig,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        return -(advantages * response_mask).sum() / response_mask.sum(), {"actor/ppo_kl": 0.5}

    data = rows(old_log_probs=[[0.0, 0.0]] * 2, advantages=[[1.0, 2.0], [6.0, 9.0]])
    loss_fn = policy_loss(actor(policy_loss=PolicyLossConfig("plain_mean")), on_policy=False)
    parts = [
        loss_fn({"log_probs": torch.zeros(1, 2)}, data.select_idxs([row]), SCALE) for row in (0, 1)
    ]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(-3.0)
    assert sum(metrics["actor/ppo_kl"].item() for _, metrics in parts) == pytest.approx(0.5)


def test_other_aggregations_apply_to_every_term() -> None:
    config = actor(entropy_coeff=1.0, loss_agg_mode="seq-mean-token-sum")
    entropy = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    outputs: Outputs = {"log_probs": torch.zeros(2, 2), "entropy": entropy}
    data = rows(old_log_probs=[[0.0, 0.0]] * 2, advantages=[[1.0, 1.0]] * 2)
    loss, metrics = policy_loss(config, on_policy=False)(outputs, data, SCALE)
    assert metrics["actor/entropy_loss"].item() == 1.5  # (2 + 1) / 2 sequences
    assert loss.item() == -3.0


def test_value_loss() -> None:
    config = CriticConfig(cliprange_value=0.5, loss_agg_mode="token-mean")
    values = torch.tensor([[1.0, 2.0], [3.0, 99.0]])
    data = rows(values=[[1.0, 2.0], [1.0, 0.0]], returns=[[2.0, 2.0], [1.0, 0.0]])
    loss, metrics = value_loss(config)({"values": values}, data, SCALE)
    # Squared errors 1, 0 and 4; clipping the last to 1.5 would make it smaller, so it is not.
    assert loss.item() == pytest.approx((1 + 0 + 4) / 3 / 2)
    assert metrics["critic/vpred_mean"].item() == 2.0
    assert metrics["critic/vf_clipfrac"].item() == 0.0
