"""Losses with one ratio for a whole sequence: GSPO's and GMPO's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from caldera.core_algos.aggregation import LossScale
from caldera.core_algos.masked import masked_sum, zero_outside
from caldera.core_algos.policy_losses.base import (
    LossAndMetrics,
    bounded_exp,
    clip_range,
    clipped_objective,
    log_ratio_of,
    register_policy_loss,
    update_metrics,
    weighted,
)

if TYPE_CHECKING:
    from caldera.config.actor import ActorConfig

__all__ = ["compute_policy_loss_geo_mean", "compute_policy_loss_gspo"]

MAX_SEQUENCE_LOG_RATIO = 10.0


@register_policy_loss("gspo")
def compute_policy_loss_gspo(
    old_log_prob: Tensor,  # (B, R), as are all tensors here
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """GSPO: PPO's clipped objective with the geometric mean of a sequence's ratios in place of
    each of them.

    The gradient reaches a token through its own log-prob alone, so that advantages may differ
    between tokens. Aggregation is always seq-mean-token-mean: `loss_agg_mode` is not read.
    """
    scale = scale or LossScale.from_mask(response_mask)
    log_prob = zero_outside(log_prob, response_mask)
    log_ratio = log_ratio_of(old_log_prob, log_prob.detach(), response_mask)
    sequence_log_ratio = _sequence_mean(log_ratio, response_mask).unsqueeze(-1)  # (B, 1)
    own_gradient = log_prob - log_prob.detach()  # 0
    ratio = (sequence_log_ratio + own_gradient).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()

    losses, clipped = clipped_objective(ratio, advantages, config)
    losses = weighted(losses, rollout_is_weights)
    loss = scale.aggregate(losses, response_mask, "seq-mean-token-mean")
    return loss, update_metrics(scale, response_mask, -log_ratio, clipped)


@register_policy_loss("geo_mean")
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,  # (B, R), as are all tensors here
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """GMPO: the geometric mean of a sequence's ratios, clipped one by one in log space, times the
    mean of its advantages.

    The log-ratio of a token is cut at `clip_ratio_high` where its advantage is positive, and held
    at `-clip_ratio_low` otherwise. The loss is the mean over the sequences that have tokens:
    `loss_agg_mode` is not read. Importance weights count with their geometric mean in a sequence,
    so that one weight of 0 takes out all of it.
    """
    low, high = clip_range(config)
    scale = scale or LossScale.from_mask(response_mask)
    log_ratio = log_ratio_of(old_log_prob, log_prob, response_mask)
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))

    ratio = bounded_exp(_sequence_mean(clipped, response_mask))  # (B,)
    losses = -_sequence_mean(advantages, response_mask) * ratio
    if rollout_is_weights is not None:
        losses = losses * _sequence_mean(rollout_is_weights.log(), response_mask).exp()

    # A sequence is one element here: its sum is itself.
    loss = scale.aggregate(
        losses.unsqueeze(-1), response_mask.bool().any(-1, keepdim=True), "seq-mean-token-sum"
    )
    metrics = update_metrics(
        scale, response_mask, -log_ratio, clipped < log_ratio, clipped > log_ratio
    )
    return loss, metrics


def _sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(B, R) -> (B,): means over tokens, 0 for a sequence without any."""
    return masked_sum(values, mask, dim=-1) / mask.bool().sum(-1).clamp(min=1)
