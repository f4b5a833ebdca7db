"""Losses that bound the ratio of each token: PPO's and CISPO's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from caldera.core_algos.aggregation import LossScale
from caldera.core_algos.masked import zero_outside
from caldera.core_algos.policy_losses.base import (
    MAX_LOG_RATIO,
    LossAndMetrics,
    bounded_exp,
    clip_range,
    clipped_objective,
    log_ratio_of,
    register_policy_loss,
    update_metrics,
    weighted,
)
from caldera.errors import ConfigError

if TYPE_CHECKING:
    from caldera.config.actor import ActorConfig

__all__ = ["compute_policy_loss_cispo", "compute_policy_loss_vanilla"]


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: Tensor,  # (B, R), as are all tensors here
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """PPO's clipped objective, with dual clip: where the advantage is negative, the loss stops
    growing at `clip_ratio_c` times its size."""
    if config.clip_ratio_c <= 1:
        raise ConfigError(
            f"actor_rollout_ref.actor.clip_ratio_c={config.clip_ratio_c} must be greater than 1"
        )
    scale = scale or LossScale.from_mask(response_mask)
    log_ratio = log_ratio_of(old_log_prob, log_prob, response_mask)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    pessimistic, clipped = clipped_objective(log_ratio.exp(), advantages, config)
    ceiling = -advantages * config.clip_ratio_c
    negative = advantages < 0
    losses = torch.where(negative, torch.minimum(pessimistic, ceiling), pessimistic)
    losses = weighted(losses, rollout_is_weights)

    loss = scale.aggregate(losses, response_mask, loss_agg_mode, config.loss_scale_factor)
    over_ceiling = (pessimistic > ceiling) & negative
    return loss, update_metrics(scale, response_mask, -log_ratio, clipped, over_ceiling)


@register_policy_loss("cispo")
def compute_policy_loss_cispo(
    old_log_prob: Tensor,  # (B, R), as are all tensors here
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """CISPO: the policy gradient, weighed by the clipped ratio as a constant. A clipped token
    keeps its gradient."""
    low, high = clip_range(config)
    scale = scale or LossScale.from_mask(response_mask)
    log_prob = zero_outside(log_prob, response_mask)
    log_ratio = log_ratio_of(old_log_prob, log_prob.detach(), response_mask)
    ratio = bounded_exp(log_ratio)
    weight = ratio.clamp(1 - low, 1 + high)

    losses = weighted(-weight * advantages * log_prob, rollout_is_weights)
    loss = scale.aggregate(losses, response_mask, loss_agg_mode, config.loss_scale_factor)
    return loss, update_metrics(scale, response_mask, -log_ratio, clipped=weight != ratio)
