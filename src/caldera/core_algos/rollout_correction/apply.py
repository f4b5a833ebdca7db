"""Rollout correction of a batch, by the keys of `algorithm.rollout_correction`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from caldera.config.rollout_correction import (
    Rejection,
    WeightBounds,
    check_is_level,
    parse_rejections,
    parse_weight_bounds,
)
from caldera.core_algos.masked import masked_mean, zero_outside
from caldera.core_algos.rollout_correction.metrics import (
    Metrics,
    log_ratios_of,
    mismatch_metrics,
    rejected_fractions,
    rejection_metrics,
    safe_exp,
    weight_metrics,
)

# ---- Importance weights: how much more likely the trained policy is to sample what the sampler did


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


# ---- Rejection: statistics of the ratio by which tokens or whole sequences leave the loss token_k*
# of each token                  k1 = -l
#     seq_sum_k*   sum over a sequence's tokens   k2 = l^2 / 2
#     seq_mean_k*  their mean                     k3 = e^l - 1 - l
#     seq_max_k*   the largest of them
#
# Each of k1, k2 and k3 estimates KL(rollout || train) from samples of the rollout. k1 is signed; k2
# and k3 are not, and large wherever the two policies differ.

# Each is 0 where l is, and so outside the mask.
_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": torch.neg,
    "k2": lambda log_ratios: 0.5 * log_ratios.square(),
    "k3": lambda log_ratios: log_ratios.expm1() - log_ratios,
}


def rejection_statistic(log_ratios: Tensor, mask: Tensor, statistic: str) -> Tensor:
    """One of RS_STATISTICS, (B, R); one of a sequence stands on each of its tokens."""
    level, estimate = statistic.rsplit("_", 1)
    values = _ESTIMATES[estimate](log_ratios)
    if level == "token":
        return values
    if level == "seq_sum":
        of_sequence = values.sum(-1)
    elif level == "seq_mean":
        of_sequence = masked_mean(values, mask, dim=-1)
    else:
        # The column of zeros changes no maximum, as k2 and k3 are not negative, but gives one to
        # responses of width 0.
        of_sequence = torch.nn.functional.pad(values, (0, 1)).amax(-1)
    return zero_outside(of_sequence.unsqueeze(-1).expand_as(values), mask)


def within_bounds(values: Tensor, rejection: Rejection) -> Tensor:
    """Where the statistic is kept; not where it is NaN."""
    return (values >= rejection.lower) & (values <= rejection.upper)


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
