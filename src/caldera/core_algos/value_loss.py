"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from caldera.core_algos.aggregation import LossScale, zero_outside


def compute_value_loss(
    vpreds: Tensor,  # (B, R), as are all tensors here
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    scale: LossScale | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Half the squared error of the value, or of the value kept within `cliprange_value` of the
    old one, whichever is larger; and the fraction of tokens where the clipped error was.

    With `scale` both are the share of one micro-batch: shares add up to the mini-batch's value.
    """
    scale = scale or LossScale.from_mask(response_mask)
    vpreds = zero_outside(vpreds, response_mask)
    clipped_vpreds = vpreds.clamp(values - cliprange_value, values + cliprange_value)
    errors = (vpreds - returns).square()
    clipped_errors = (clipped_vpreds - returns).square()
    losses = 0.5 * torch.maximum(errors, clipped_errors)
    vf_loss = scale.aggregate(losses, response_mask, loss_agg_mode, loss_scale_factor)
    clipped = (clipped_errors > errors).to(losses.dtype)
    return vf_loss, scale.token_mean(clipped, response_mask)
