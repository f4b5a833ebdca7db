"""Losses that treat the few tokens apart whose log-prob and advantage covary most: these are the
ones that make a policy's entropy collapse.

Which tokens these are is decided among the tensors at hand. These two losses are therefore the
only ones whose value depends on how a mini-batch is cut into micro-batches and ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from caldera.core_algos.aggregation import LossScale
from caldera.core_algos.masked import masked_mean, zero_outside
from caldera.core_algos.policy_losses.base import (
    LossAndMetrics,
    bounded_exp,
    clipped_objective,
    log_ratio_of,
    register_policy_loss,
    update_metrics,
    weighted,
)

if TYPE_CHECKING:
    from caldera.config.actor import ActorConfig

__all__ = ["compute_policy_loss_clip_cov", "compute_policy_loss_kl_cov"]


@register_policy_loss("clip_cov")
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,  # (B, R), as are all tensors here
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """Clip-Cov: PPO's clipped objective (no dual clip), less a random few of the tokens with a
    covariance between `clip_cov_lb` and `clip_cov_ub`.

    The few are `clip_cov_ratio` of all tokens, and one at least, among those that are not clipped
    already; they count as 0 in the mean. The draw is a function of the tensors alone (see
    `_draw`), so that a resumed run repeats it. The loss depends on how micro-batches are cut.
    """
    settings = config.policy_loss
    scale = scale or LossScale.from_mask(response_mask)
    log_ratio = log_ratio_of(old_log_prob, log_prob, response_mask)
    losses, clipped = clipped_objective(bounded_exp(log_ratio), advantages, config)

    covariances = _covariances(log_prob, advantages, response_mask)
    within = (covariances > settings.clip_cov_lb) & (covariances < settings.clip_cov_ub)
    candidates = within & ~clipped & response_mask.bool()
    number = _few(settings.clip_cov_ratio, response_mask)
    taken_out = _draw(candidates, number, old_log_prob, _seed_of(old_log_prob, response_mask))

    losses = weighted(losses.masked_fill(taken_out, 0), rollout_is_weights)
    loss = scale.aggregate(losses, response_mask, loss_agg_mode, config.loss_scale_factor)
    return loss, update_metrics(scale, response_mask, -log_ratio, clipped | taken_out)


@register_policy_loss("kl_cov")
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,  # (B, R), as are all tensors here
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """KL-Cov: the ratio times the advantage, unclipped, and a hold on the tokens with the highest
    covariance: `ppo_kl_coef` times the absolute log-ratio.

    These are `kl_cov_ratio` of all tokens, and one at least. The metric actor/ppo_kl is the mean
    absolute log-ratio. The loss depends on how micro-batches are cut.
    """
    settings = config.policy_loss
    scale = scale or LossScale.from_mask(response_mask)
    log_ratio = log_ratio_of(old_log_prob, log_prob, response_mask)
    distance = log_ratio.abs()

    covariances = _covariances(log_prob, advantages, response_mask)
    ranked = covariances.masked_fill(~response_mask.bool(), -torch.inf).flatten()
    highest = ranked.topk(_few(settings.kl_cov_ratio, response_mask)).indices
    held = _at(highest, response_mask)

    losses = -advantages * bounded_exp(log_ratio)
    losses = losses + settings.ppo_kl_coef * distance.masked_fill(~held, 0)
    losses = weighted(losses, rollout_is_weights)
    loss = scale.aggregate(losses, response_mask, loss_agg_mode, config.loss_scale_factor)
    return loss, update_metrics(scale, response_mask, distance)


def _covariances(log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Each token's term of the covariance of log-probs and advantages, 0 outside the mask."""
    log_prob = log_prob.detach()
    from_mean_advantage = advantages - masked_mean(advantages, mask)
    from_mean_log_prob = log_prob - masked_mean(log_prob, mask)
    return zero_outside(from_mean_advantage * from_mean_log_prob, mask)


def _few(ratio: float, mask: Tensor) -> int:
    """That part of the mask's tokens, at least one if there is any."""
    tokens = int(mask.bool().sum())
    return min(tokens, max(1, int(ratio * tokens)))


def _seed_of(values: Tensor, mask: Tensor) -> int:
    """A number from the bits of the values in the mask, whatever their order and padding."""
    return int(values.detach()[mask.bool()].double().view(torch.int64).sum())


def _draw(candidates: Tensor, number: int, values: Tensor, seed: int) -> Tensor:
    """A mask of that many candidates, or of all if there are fewer.

    The generator is the call's own, and on the CPU: the draw neither moves the global one nor
    depends on the device. Candidates are put in the order of their values first, so that the
    order of rows does not matter either.
    """
    positions = candidates.flatten().nonzero().squeeze(-1)
    positions = positions[values.flatten()[positions].argsort(stable=True)]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(positions), generator=generator)[:number]
    return _at(positions[drawn.to(positions.device)], candidates)


def _at(positions: Tensor, like: Tensor) -> Tensor:
    """A mask with ones at these positions of the flattened tensor."""
    mask = torch.zeros(like.numel(), dtype=torch.bool, device=like.device)
    mask[positions] = True
    return mask.view(like.shape)
