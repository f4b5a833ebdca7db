"""DPPO: losses that drop tokens by how far their probability has moved, not by its ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from caldera.core_algos.policy_losses.base import (
    LossAndMetrics,
    LossInputs,
    bounded_exp,
    clip_range,
    policy_loss,
)


@policy_loss("dppo_tv")
def compute_policy_loss_dppo_tv(given: LossInputs) -> LossAndMetrics:
    """DPPO with total variation: a token is dropped once its probability has risen by more than
    `clip_ratio_high` (advantage > 0), or fallen by more than `clip_ratio_low` (otherwise)."""
    low, high = clip_range(given.config)
    moved = given.log_prob.detach().exp() - given.old_log_prob.exp()
    keep = torch.where(given.advantages > 0, moved <= high, moved >= -low)
    return _kept_policy_gradient(given, keep)


@policy_loss("dppo_kl")
def compute_policy_loss_dppo_kl(given: LossInputs) -> LossAndMetrics:
    """DPPO with binary KL (this token against all others): a token is dropped once the KL from
    the old policy is above `clip_ratio_high` (advantage > 0) or `clip_ratio_low` (otherwise),
    unless its gradient leads back towards the old policy."""
    low, high = clip_range(given.config)
    old, new = given.old_log_prob, given.log_prob.detach()
    divergence = _binary_kl(old, new)
    keep = torch.where(
        given.advantages > 0,
        (divergence <= high) | (new <= old),
        (divergence <= low) | (new >= old),
    )
    return _kept_policy_gradient(given, keep)


def _kept_policy_gradient(given: LossInputs, keep: Tensor) -> LossAndMetrics:
    """The policy gradient of the tokens to keep, weighed by their ratio as a constant, at most
    `clip_ratio_c`. The metrics count the tokens dropped (actor/pg_clipfrac) and those whose ratio
    was cut (actor/pg_clipfrac_lower)."""
    log_ratio = given.log_ratio().detach()
    ratio, most = bounded_exp(log_ratio), given.config.clip_ratio_c
    losses = -given.advantages * ratio.clamp(max=most) * given.kept_log_prob()
    loss = given.aggregate(losses.masked_fill(~keep, 0))
    return loss, given.metrics(-log_ratio, ~keep, keep & (ratio > most))


def _binary_kl(old_log_prob: Tensor, log_prob: Tensor) -> Tensor:
    """KL of (p, 1 - p) from the old to the new policy."""
    old, old_rest = old_log_prob, _log_of_the_rest(old_log_prob)
    return old.exp() * (old - log_prob) + old_rest.exp() * (old_rest - _log_of_the_rest(log_prob))


def _log_of_the_rest(log_prob: Tensor) -> Tensor:
    """log(1 - p), exact near p = 1 and finite at it."""
    below_one = log_prob.clamp(max=-torch.finfo(log_prob.dtype).tiny)
    return (-torch.expm1(below_one)).log()
