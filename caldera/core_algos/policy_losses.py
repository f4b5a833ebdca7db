"""Policy losses.

A registered loss is called as

    f(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
      rollout_is_weights=None, scale=None) -> (loss, metrics)

on (B, R) tensors, with `config` the ActorConfig. `scale` holds the counts of the whole mini-batch
when the tensors are one micro-batch of it; the loss and every metric are then this micro-batch's
share, and the shares add up to the exact value of the mini-batch (sum over micro-batches, mean
over ranks). Without `scale` the tensors are the whole. Metrics are detached scalar tensors, left
on their device so that nothing waits for it here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from caldera.core_algos.aggregation import LossScale
from caldera.core_algos.masked import zero_outside
from caldera.errors import ConfigError
from caldera.registry import Registry

if TYPE_CHECKING:
    from caldera.config.actor import ActorConfig

__all__ = [
    "POLICY_LOSSES",
    "PolicyLossFn",
    "compute_policy_loss_vanilla",
    "get_policy_loss_fn",
    "register_policy_loss",
]

PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Tensor]]]

POLICY_LOSSES: Registry[PolicyLossFn] = Registry("actor_rollout_ref.actor.policy_loss.loss_mode")

MAX_LOG_RATIO = 20.0  # e^20 is finite in every dtype but float16


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorate a loss to make it a value of `actor_rollout_ref.actor.policy_loss.loss_mode`."""
    return POLICY_LOSSES.register(name)


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    return POLICY_LOSSES[name]


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
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective, with dual clip: where the advantage is negative, the loss stops
    growing at `clip_ratio_c` times its size."""
    low, high = _clip_range(config)
    scale = scale or LossScale.from_mask(response_mask)

    log_ratio = zero_outside(log_prob - old_log_prob, response_mask)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()

    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    pessimistic = torch.maximum(unclipped, clipped)
    ceiling = -advantages * config.clip_ratio_c
    negative = advantages < 0
    losses = torch.where(negative, torch.minimum(pessimistic, ceiling), pessimistic)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights

    loss = scale.aggregate(losses, response_mask, loss_agg_mode, config.loss_scale_factor)
    dtype = losses.dtype
    metrics = {
        "actor/pg_clipfrac": (clipped > unclipped).to(dtype),
        "actor/ppo_kl": -log_ratio,
        "actor/pg_clipfrac_lower": ((pessimistic > ceiling) & negative).to(dtype),
    }
    return loss, {name: scale.token_mean(m, response_mask) for name, m in metrics.items()}


def _clip_range(config: ActorConfig) -> tuple[float, float]:
    """How far below and above 1 the ratio may go."""
    if config.clip_ratio_c <= 1:
        raise ConfigError(
            f"actor_rollout_ref.actor.clip_ratio_c={config.clip_ratio_c} must be greater than 1"
        )
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return (
        config.clip_ratio if low is None else low,
        config.clip_ratio if high is None else high,
    )
