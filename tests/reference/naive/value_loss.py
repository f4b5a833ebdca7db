"""Loss of the value head.

loss = 1/2 agg(max((v - G)^2, (clip(v, v_old - c, v_old + c) - G)^2))
clip fraction = share of tokens where the second is larger
"""

from __future__ import annotations

from .aggregation import agg_gradient, agg_loss
from .basics import Matrix, clamp, each, masked_mean


def value_loss(
    vpreds: Matrix,
    values: Matrix,
    returns: Matrix,
    response_mask: Matrix,
    cliprange_value: float,
    loss_agg_mode: str,
) -> tuple[float, Matrix, float]:
    """(loss, d loss / d vpreds, clip fraction)."""

    def bounded(v: float, v_old: float) -> float:
        return clamp(v, v_old - cliprange_value, v_old + cliprange_value)

    def one(v: float, v_old: float, target: float) -> float:
        return 0.5 * max((v - target) ** 2, (bounded(v, v_old) - target) ** 2)

    def slope(v: float, v_old: float, target: float) -> float:
        return 0.0 if is_clipped(v, v_old, target) else v - target

    def is_clipped(v: float, v_old: float, target: float) -> float:
        return float((bounded(v, v_old) - target) ** 2 > (v - target) ** 2)

    losses = each(one, vpreds, values, returns)
    slopes = each(slope, vpreds, values, returns)
    clipped = each(is_clipped, vpreds, values, returns)
    return (
        agg_loss(losses, response_mask, loss_agg_mode),
        agg_gradient(slopes, response_mask, loss_agg_mode),
        masked_mean(clipped, response_mask),
    )
