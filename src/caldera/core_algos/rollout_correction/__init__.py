"""Rollout correction: training on samples whose sampler was not quite the policy.

l = log pi_train - log pi_rollout of a sampled token, and its exponential is the ratio. `weights`
turns ratios into importance weights, `rejection` into a mask, `metrics` measures both, `apply`
puts them together, and `proxies` estimates the variance of the gradient.
"""

from __future__ import annotations

from caldera.core_algos.rollout_correction.apply import (
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
)
from caldera.core_algos.rollout_correction.metrics import compute_variance_proxies

__all__ = [
    "compute_offpolicy_metrics",
    "compute_rollout_correction_and_rejection_mask",
    "compute_variance_proxies",
]
