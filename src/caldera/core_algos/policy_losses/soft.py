"""Losses without a hard clip: SAPO's soft gate, GPG's plain gradient, DRO's squared penalty."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from caldera.core_algos.aggregation import LossScale
from caldera.core_algos.masked import zero_outside
from caldera.core_algos.policy_losses.base import (
    LossAndMetrics,
    bounded_exp,
    log_ratio_of,
    register_policy_loss,
    update_metrics,
    weighted,
)
from caldera.errors import ConfigError

if TYPE_CHECKING:
    from caldera.config.actor import ActorConfig

__all__ = ["compute_policy_loss_dro", "compute_policy_loss_gpg", "compute_policy_loss_sapo"]


@register_policy_loss("sapo")
def compute_policy_loss_sapo(
    old_log_prob: Tensor,  # (B, R), as are all tensors here
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """SAPO: a sigmoid of the ratio in place of the clip. Its slope is 1 at ratio 1 and fades on
    both sides, the faster the higher `tau_pos` or `tau_neg`, by the sign of the advantage.

    Aggregation is always seq-mean-token-mean: `loss_agg_mode` is not read.
    """
    for key in ("tau_pos", "tau_neg"):
        if getattr(config, key) <= 0:
            raise ConfigError(f"actor_rollout_ref.actor.{key}={getattr(config, key)} must be > 0")
    scale = scale or LossScale.from_mask(response_mask)
    log_ratio = log_ratio_of(old_log_prob, log_prob, response_mask)
    ratio = bounded_exp(log_ratio)
    tau = torch.full_like(ratio, config.tau_neg).masked_fill(advantages > 0, config.tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau

    losses = weighted(-advantages * gate, rollout_is_weights)
    loss = scale.aggregate(losses, response_mask, "seq-mean-token-mean")
    return loss, update_metrics(scale, response_mask, -log_ratio)


@register_policy_loss("gpg")
def compute_policy_loss_gpg(
    old_log_prob: Tensor,  # (B, R), as are all tensors here
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """GPG: the policy gradient as it is. `old_log_prob` is not read, and there are no metrics."""
    scale = scale or LossScale.from_mask(response_mask)
    losses = -advantages * zero_outside(log_prob, response_mask)
    losses = weighted(losses, rollout_is_weights)
    return scale.aggregate(losses, response_mask, loss_agg_mode, config.loss_scale_factor), {}


@register_policy_loss("dro")
def compute_policy_loss_dro(
    old_log_prob: Tensor,  # (B, R), as are all tensors here
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """DRO: the policy gradient, and half the squared log-ratio times `policy_loss.dro_beta` to
    hold the policy near the old one."""
    beta = config.policy_loss.dro_beta
    if beta is None or beta <= 0:
        raise ConfigError(
            f"actor_rollout_ref.actor.policy_loss.dro_beta={beta}: loss_mode=dro needs one > 0"
        )
    scale = scale or LossScale.from_mask(response_mask)
    log_prob = zero_outside(log_prob, response_mask)
    log_ratio = log_ratio_of(old_log_prob, log_prob, response_mask)

    losses = beta / 2 * log_ratio.square() - advantages * log_prob
    losses = weighted(losses, rollout_is_weights)
    loss = scale.aggregate(losses, response_mask, loss_agg_mode, config.loss_scale_factor)
    return loss, update_metrics(scale, response_mask, -log_ratio)
