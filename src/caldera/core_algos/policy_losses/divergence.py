"""DPPO: losses that drop tokens by how far their probability has moved, not by its ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from caldera.core_algos.aggregation import LossScale, zero_outside
from caldera.core_algos.policy_losses.base import (
    LossAndMetrics,
    bounded_exp,
    clip_range,
    log_ratio_of,
    register_policy_loss,
    update_metrics,
    weighted,
)

if TYPE_CHECKING:
    from caldera.config.actor import ActorConfig


@register_policy_loss("dppo_tv")
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor,  # (B, R), as are all tensors here
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """DPPO with total variation: a token is dropped once its probability has risen by more than
    `clip_ratio_high` (advantage > 0), or fallen by more than `clip_ratio_low` (otherwise)."""
    low, high = clip_range(config)
    moved = log_prob.detach().exp() - old_log_prob.exp()
    keep = torch.where(advantages > 0, moved <= high, moved >= -low)
    return _kept_policy_gradient(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights,
        scale,
        keep,
    )


@register_policy_loss("dppo_kl")
def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor,  # (B, R), as are all tensors here
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """DPPO with binary KL (this token against all others): a token is dropped once the KL from
    the old policy is above `clip_ratio_high` (advantage > 0) or `clip_ratio_low` (otherwise),
    unless its gradient leads back towards the old policy."""
    low, high = clip_range(config)
    new = log_prob.detach()
    divergence = _binary_kl(old_log_prob, new)
    keep = torch.where(
        advantages > 0,
        (divergence <= high) | (new <= old_log_prob),
        (divergence <= low) | (new >= old_log_prob),
    )
    return _kept_policy_gradient(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights,
        scale,
        keep,
    )


def _kept_policy_gradient(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None,
    scale: LossScale | None,
    keep: Tensor,
) -> LossAndMetrics:
    """The policy gradient of the tokens to keep, weighed by their ratio as a constant, at most
    `clip_ratio_c`. The metrics count the tokens dropped (actor/pg_clipfrac) and those whose ratio
    was cut (actor/pg_clipfrac_lower)."""
    scale = scale or LossScale.from_mask(response_mask)
    log_prob = zero_outside(log_prob, response_mask)
    log_ratio = log_ratio_of(old_log_prob, log_prob.detach(), response_mask)
    ratio = bounded_exp(log_ratio)

    losses = -advantages * ratio.clamp(max=config.clip_ratio_c) * log_prob
    losses = weighted(losses.masked_fill(~keep, 0), rollout_is_weights)
    loss = scale.aggregate(losses, response_mask, loss_agg_mode, config.loss_scale_factor)
    cut = keep & (ratio > config.clip_ratio_c)
    return loss, update_metrics(scale, response_mask, -log_ratio, ~keep, cut)


def _binary_kl(old_log_prob: Tensor, log_prob: Tensor) -> Tensor:
    """KL of (p, 1 - p) from the old to the new policy."""
    old, old_rest = old_log_prob, _log_of_the_rest(old_log_prob)
    return old.exp() * (old - log_prob) + old_rest.exp() * (old_rest - _log_of_the_rest(log_prob))


def _log_of_the_rest(log_prob: Tensor) -> Tensor:
    """log(1 - p), exact near p = 1 and finite at it."""
    below_one = log_prob.clamp(max=-torch.finfo(log_prob.dtype).tiny)
    return (-torch.expm1(below_one)).log()
