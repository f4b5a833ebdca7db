"""One loss from a matrix of token losses.

    token-mean               sum / tokens of the batch
    token-sum                sum
    seq-mean-token-sum       sum / responses of the batch that have a token
    seq-mean-token-sum-norm  the same / (loss_scale_factor or R)
    seq-mean-token-mean      mean over responses that have a token of the mean over their tokens

Counts are those of the matrix, unless the whole batch's are given (`batch_num_tokens`,
`global_batch_size`). The result is multiplied by `dp_size`, for a later mean over ranks. A batch
without any token gives 0.
"""

from __future__ import annotations

import math

from .basics import EPSILON, Matrix, kept, zeros

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)


def agg_loss(
    loss_mat: Matrix,
    loss_mask: Matrix,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> float:
    sums: list[float] = []
    means: list[float] = []
    tokens = 0
    for losses, mask in zip(loss_mat, loss_mask, strict=True):
        of_row = kept(losses, mask)
        if of_row:
            tokens += len(of_row)
            sums.append(math.fsum(of_row))
            means.append(math.fsum(of_row) / (len(of_row) + EPSILON))
    tokens = batch_num_tokens or tokens
    responses = global_batch_size or len(sums)
    if not sums:
        return 0.0
    if loss_agg_mode == "token-mean":
        return math.fsum(sums) / tokens * dp_size
    if loss_agg_mode == "token-sum":
        return math.fsum(sums) * dp_size
    if loss_agg_mode == "seq-mean-token-sum":
        return math.fsum(sums) / responses * dp_size
    if loss_agg_mode == "seq-mean-token-sum-norm":
        scale = loss_scale_factor or len(loss_mat[0])
        return math.fsum(sums) / responses / scale * dp_size
    if loss_agg_mode == "seq-mean-token-mean":
        return math.fsum(means) / responses * dp_size
    raise ValueError(f"unknown loss_agg_mode {loss_agg_mode}")


def agg_gradient(
    slopes: Matrix, loss_mask: Matrix, loss_agg_mode: str, loss_scale_factor: float | None = None
) -> Matrix:
    """Gradient of the aggregated loss, from the slope of each token's own loss.

    Every mode is linear: a token's share is what the mode makes of that token alone.
    """
    gradient = zeros(slopes)
    for row, mask in enumerate(loss_mask):
        for t, here in enumerate(mask):
            if here:
                alone = zeros(slopes)
                alone[row][t] = slopes[row][t]
                gradient[row][t] = agg_loss(
                    alone, loss_mask, loss_agg_mode, loss_scale_factor=loss_scale_factor
                )
    return gradient
