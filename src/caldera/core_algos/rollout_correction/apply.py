"""Rollout correction of a batch, by the keys of `algorithm.rollout_correction`."""

from __future__ import annotations

import torch
from torch import Tensor

from caldera.config.rollout_correction import (
    check_is_level,
    parse_rejections,
    parse_weight_bounds,
)
from caldera.core_algos.masked import zero_outside
from caldera.core_algos.rollout_correction.metrics import (
    Metrics,
    mismatch_metrics,
    rejected_fractions,
    rejection_metrics,
    weight_metrics,
)
from caldera.core_algos.rollout_correction.rejection import rejection_statistic, within_bounds
from caldera.core_algos.rollout_correction.weights import (
    bound_weights,
    importance_ratios,
    log_ratios_of,
    normalize_weights,
)

__all__ = ["compute_offpolicy_metrics", "compute_rollout_correction_and_rejection_mask"]


@torch.no_grad()
def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,  # (B, R), as are all tensors here
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: object = 2.0,
    rollout_rs: str | None = None,
    rollout_rs_threshold: object = None,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor | None, Tensor, Metrics]:
    """(importance weights or None, response mask without what is rejected, metrics).

    `old_log_prob` are the trainer's: those of the batch in decoupled mode, those of the policy that
    is being updated in bypass mode. Weights are 0 outside `response_mask`, detached, and normalised
    over the rows given here, rejected ones included. Metrics, too, are of the mask as it comes in:
    detached scalar tensors on the device of their inputs; who logs them calls `.item()`.
    """
    metrics = mismatch_metrics(old_log_prob, rollout_log_prob, response_mask)
    log_ratios = log_ratios_of(old_log_prob, rollout_log_prob, response_mask)
    weights = None
    if rollout_is is not None:
        check_is_level(rollout_is)
        bounds = parse_weight_bounds(rollout_is_threshold)
        ratios = importance_ratios(log_ratios, response_mask, rollout_is)
        weights = bound_weights(ratios, bounds)
        if rollout_is_batch_normalize:
            weights = normalize_weights(weights, response_mask, rollout_is)
        metrics |= weight_metrics(ratios, weights, response_mask, bounds)
    if rollout_rs is None:
        return weights, response_mask, metrics

    passed = torch.ones_like(response_mask, dtype=torch.bool)
    for rejection in parse_rejections(rollout_rs, rollout_rs_threshold):
        values = rejection_statistic(log_ratios, response_mask, rejection.statistic)
        passed_this = within_bounds(values, rejection)
        metrics |= rejection_metrics(rejection, values, passed_this, response_mask)
        passed &= passed_this
    metrics |= rejected_fractions("rollout_rs", passed, response_mask)
    return weights, zero_outside(response_mask, passed), metrics


@torch.no_grad()
def compute_offpolicy_metrics(
    old_log_prob: Tensor,  # (B, R), as are all tensors here
    rollout_log_prob: Tensor,
    response_mask: Tensor,
) -> Metrics:
    """How far trainer and sampler are apart: `metrics.mismatch_metrics`, for runs that correct
    nothing. Detached scalar tensors; who logs them calls `.item()`."""
    return mismatch_metrics(old_log_prob, rollout_log_prob, response_mask)
