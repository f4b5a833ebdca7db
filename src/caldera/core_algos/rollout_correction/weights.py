"""Importance weights: how much more likely the trained policy is to sample what the sampler did."""

from __future__ import annotations

import torch
from torch import Tensor

from caldera.config.rollout_correction import WeightBounds
from caldera.core_algos.masked import masked_mean, zero_outside

__all__ = [
    "bound_weights",
    "importance_ratios",
    "log_ratios_of",
    "normalize_weights",
    "safe_exp",
]

MAX_LOG_RATIO = 20.0


def safe_exp(exponents: Tensor) -> Tensor:
    """e^x of x clamped to +-20, so that it and its square are finite."""
    return exponents.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def log_ratios_of(old_log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """l of each token, clamped to +-20; 0 outside the mask. All are (B, R)."""
    differences = zero_outside(old_log_prob - rollout_log_prob, mask)
    return differences.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratios(log_ratios: Tensor, mask: Tensor, level: str) -> Tensor:
    """e^l of each token, or e^(sum of l) of its sequence; 0 outside the mask. All are (B, R)."""
    if level == "sequence":
        log_ratios = log_ratios.sum(-1, keepdim=True).expand_as(log_ratios)
    return zero_outside(safe_exp(log_ratios), mask)


def bound_weights(ratios: Tensor, bounds: WeightBounds) -> Tensor:
    """Truncated importance sampling with one bound, IcePop with two."""
    if bounds.lower is None:
        return ratios.clamp(max=bounds.upper)
    inside = (ratios >= bounds.lower) & (ratios <= bounds.upper)
    return ratios.masked_fill(~inside, 0)


def normalize_weights(weights: Tensor, mask: Tensor, level: str) -> Tensor:
    """Scale to a mean of 1 over tokens or over sequences; weights that are all 0 stay so."""
    kept = mask.bool()
    if level == "sequence":
        mean = masked_mean(masked_mean(weights, kept, dim=-1), kept.any(-1))
    else:
        mean = masked_mean(weights, kept)
    return weights / torch.where(mean > 0, mean, 1)
