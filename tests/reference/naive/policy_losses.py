"""Policy losses that look at one token at a time.

    d = log_prob - old_log_prob      r = e^d      A = advantage      lp = log_prob

Each function of the upper part takes (lp, old, A, settings) of ONE token and gives (loss, slope):
the loss of the token and its derivative with respect to lp. What a formula writes as sg(..) is
held fixed in the derivative. `token_loss` then multiplies both with the importance weight of the
token, if any, and aggregates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .aggregation import agg_gradient, agg_loss
from .basics import Matrix, clamp, each, masked_mean


@dataclass
class Settings:
    """What the losses read from the configuration, with its defaults."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 0.1
    dro_beta: float = 0.0
    loss_scale_factor: float | None = None


@dataclass
class LossResult:
    loss: float
    gradient: Matrix
    """d loss / d log_prob."""
    metrics: dict[str, float]


LossAndSlope = tuple[float, float]
TokenLoss = Callable[[float, float, float, Settings], LossAndSlope]


def clipped(r: float, slope_of_r: float, a: float, settings: Settings) -> LossAndSlope:
    """max(-A r, -A clip(r, 1 - low, 1 + high))."""
    bounded = clamp(r, 1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high)
    if -a * bounded > -a * r:
        return -a * bounded, 0.0
    return -a * r, -a * slope_of_r


def vanilla(lp: float, old: float, a: float, settings: Settings) -> LossAndSlope:
    """max(-A r, -A clip(r)), and for A < 0 at most -A c (dual clip); d clamped to +-20."""
    d = clamp(lp - old, -20, 20)
    r = math.exp(d)
    loss, slope = clipped(r, r if d == lp - old else 0.0, a, settings)
    if a < 0 and loss > -a * settings.clip_ratio_c:
        return -a * settings.clip_ratio_c, 0.0
    return loss, slope


def clip_without_dual(lp: float, old: float, a: float, settings: Settings) -> LossAndSlope:
    """max(-A r, -A clip(r))."""
    r = math.exp(lp - old)
    return clipped(r, r, a, settings)


def sapo(lp: float, old: float, a: float, settings: Settings) -> LossAndSlope:
    """-A sigmoid(tau (r - 1)) 4 / tau, tau = tau_pos if A > 0 else tau_neg."""
    r = math.exp(lp - old)
    tau = settings.tau_pos if a > 0 else settings.tau_neg
    x = clamp(tau * (r - 1), -700, 700)
    gate = 1 / (1 + math.exp(-x))
    gate_slope = gate * (1 / (1 + math.exp(x))) * tau * r
    return -a * gate * 4 / tau, -a * gate_slope * 4 / tau


def gpg(lp: float, old: float, a: float, settings: Settings) -> LossAndSlope:
    """-A lp."""
    return -a * lp, -a


def cispo(lp: float, old: float, a: float, settings: Settings) -> LossAndSlope:
    """-sg(clip(r, 1 - low, 1 + high)) A lp."""
    r = math.exp(lp - old)
    fixed = clamp(r, 1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high)
    return -fixed * a * lp, -fixed * a


def dppo_tv(lp: float, old: float, a: float, settings: Settings) -> LossAndSlope:
    """-A sg(min(r, c)) lp keep; keep = p - p_old <= high if A > 0, else p - p_old >= -low."""
    moved = math.exp(lp) - math.exp(old)
    keep = moved <= settings.clip_ratio_high if a > 0 else moved >= -settings.clip_ratio_low
    fixed = min(math.exp(lp - old), settings.clip_ratio_c) if keep else 0.0
    return -a * fixed * lp, -a * fixed


def binary_kl(p_old: float, p: float) -> float:
    """Divergence of "this token or another one" from the old policy to the new one."""
    return p_old * math.log(p_old / p) + (1 - p_old) * math.log((1 - p_old) / (1 - p))


def dppo_kl(lp: float, old: float, a: float, settings: Settings) -> LossAndSlope:
    """-A sg(min(r, c)) lp keep; a token is dropped if it moved on, too far, in A's direction.

    A > 0: dropped if p > p_old and kl > high.  A <= 0: dropped if p < p_old and kl > low.
    """
    p, p_old = math.exp(lp), math.exp(old)
    distance = binary_kl(p_old, p)
    if a > 0:
        keep = p <= p_old or distance <= settings.clip_ratio_high
    else:
        keep = p >= p_old or distance <= settings.clip_ratio_low
    fixed = min(math.exp(lp - old), settings.clip_ratio_c) if keep else 0.0
    return -a * fixed * lp, -a * fixed


def dro(lp: float, old: float, a: float, settings: Settings) -> LossAndSlope:
    """-(lp A - beta d^2 / 2)."""
    d = lp - old
    return -(lp * a - 0.5 * settings.dro_beta * d**2), -(a - settings.dro_beta * d)


TOKEN_LOSSES: dict[str, TokenLoss] = {
    "vanilla": vanilla,
    "sapo": sapo,
    "gpg": gpg,
    "cispo": cispo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
}


def token_loss(
    name: str,
    old_log_prob: Matrix,
    log_prob: Matrix,
    advantages: Matrix,
    response_mask: Matrix,
    loss_agg_mode: str,
    settings: Settings,
    rollout_is_weights: Matrix | None = None,
) -> LossResult:
    """Loss, gradient and metrics of a batch. `sapo` always takes seq-mean-token-mean."""
    mode = "seq-mean-token-mean" if name == "sapo" else loss_agg_mode
    one = TOKEN_LOSSES[name]

    def at(part: int) -> Matrix:
        return each(
            lambda lp, old, a: one(lp, old, a, settings)[part], log_prob, old_log_prob, advantages
        )

    result = reduce_loss(at(0), at(1), response_mask, mode, settings, rollout_is_weights)
    if name != "gpg":
        result.metrics["ppo_kl"] = mean_kl(old_log_prob, log_prob, response_mask, name == "vanilla")
    if name == "vanilla":
        result.metrics.update(
            clip_fractions(old_log_prob, log_prob, advantages, response_mask, settings)
        )
    return result


def reduce_loss(
    losses: Matrix,
    slopes: Matrix,
    mask: Matrix,
    mode: str,
    settings: Settings,
    rollout_is_weights: Matrix | None = None,
) -> LossResult:
    if rollout_is_weights is not None:
        losses = each(lambda x, w: x * w, losses, rollout_is_weights)
        slopes = each(lambda x, w: x * w, slopes, rollout_is_weights)
    factor = settings.loss_scale_factor
    return LossResult(
        loss=agg_loss(losses, mask, mode, loss_scale_factor=factor),
        gradient=agg_gradient(slopes, mask, mode, factor),
        metrics={},
    )


def mean_kl(old_log_prob: Matrix, log_prob: Matrix, mask: Matrix, clamped: bool) -> float:
    """masked_mean(-d)."""
    bound = 20.0 if clamped else math.inf
    return masked_mean(
        each(lambda lp, old: -clamp(lp - old, -bound, bound), log_prob, old_log_prob), mask
    )


def clip_fractions(
    old_log_prob: Matrix, log_prob: Matrix, advantages: Matrix, mask: Matrix, settings: Settings
) -> dict[str, float]:
    """Share of tokens where the clip, and then the dual clip, changed the loss."""

    def is_clipped(lp: float, old: float, a: float) -> float:
        r = math.exp(clamp(lp - old, -20, 20))
        return float(clipped(r, r, a, settings)[0] > -a * r)

    def is_dual_clipped(lp: float, old: float, a: float) -> float:
        r = math.exp(clamp(lp - old, -20, 20))
        return float(a < 0 and clipped(r, r, a, settings)[0] > -a * settings.clip_ratio_c)

    return {
        "pg_clipfrac": masked_mean(each(is_clipped, log_prob, old_log_prob, advantages), mask),
        "pg_clipfrac_lower": masked_mean(
            each(is_dual_clipped, log_prob, old_log_prob, advantages), mask
        ),
    }
