"""Rejection: statistics of the ratio by which tokens or whole sequences leave the loss.

    token_k*     of each token                  k1 = -l
    seq_sum_k*   sum over a sequence's tokens   k2 = l^2 / 2
    seq_mean_k*  their mean                     k3 = e^l - 1 - l
    seq_max_k*   the largest of them

Each of k1, k2 and k3 estimates KL(rollout || train) from samples of the rollout. k1 is signed; k2
and k3 are not, and large wherever the two policies differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from caldera.config.rollout_correction import Rejection
from caldera.core_algos.masked import masked_mean, zero_outside

__all__ = ["rejection_statistic", "within_bounds"]

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
