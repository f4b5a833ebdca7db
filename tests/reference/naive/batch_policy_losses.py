"""Policy losses in which a token's loss depends on other tokens.

    d = log_prob - old_log_prob      r = e^d      A = advantage      lp = log_prob
    cov = (A - mean A)(lp - mean lp), means over the masked-in tokens of the batch

gspo and geo_mean have one ratio a response; clip_cov and kl_cov choose tokens by covariance.
"""

from __future__ import annotations

import math

from .basics import Matrix, each, kept, kept_of_all, masked_mean, mean, sign, zeros
from .policy_losses import (
    LossResult,
    Settings,
    clip_without_dual,
    clipped,
    mean_kl,
    reduce_loss,
)


def gspo(
    old_log_prob: Matrix,
    log_prob: Matrix,
    advantages: Matrix,
    response_mask: Matrix,
    settings: Settings,
    rollout_is_weights: Matrix | None = None,
) -> LossResult:
    """max(-A s, -A clip(s)) for each token, aggregated by seq-mean-token-mean.

    log s = min(10, mean over the response of d); in the derivative each token carries the whole
    ratio: s_t = sg(s) e^(lp_t - sg(lp_t)), so that d s_t / d lp_t = s (0 where the 10 holds).
    """
    losses, slopes, was_clipped = zeros(log_prob), zeros(log_prob), zeros(log_prob)
    for row, mask in enumerate(response_mask):
        d = [lp - old for lp, old in zip(log_prob[row], old_log_prob[row], strict=True)]
        if not any(mask):
            continue
        raw = mean(kept(d, mask))
        s = math.exp(min(10.0, raw))
        for t, a in enumerate(advantages[row]):
            losses[row][t], slopes[row][t] = clipped(s, s if raw < 10 else 0.0, a, settings)
            was_clipped[row][t] = float(losses[row][t] > -a * s)
    result = reduce_loss(
        losses, slopes, response_mask, "seq-mean-token-mean", settings, rollout_is_weights
    )
    result.metrics["pg_clipfrac"] = masked_mean(was_clipped, response_mask)
    result.metrics["ppo_kl"] = mean_kl(old_log_prob, log_prob, response_mask, clamped=False)
    return result


def geo_mean(
    old_log_prob: Matrix,
    log_prob: Matrix,
    advantages: Matrix,
    response_mask: Matrix,
    settings: Settings,
    rollout_is_weights: Matrix | None = None,
) -> LossResult:
    """-mean over responses that have a token of A_seq exp(mean_t d'_t), A_seq = mean_t A_t.

    d' = min(d, high) for A > 0, max(d, -low) for A < 0, 0 for A = 0: the side that would make
    the loss look better is cut off, the other is not. Importance weights of a response enter by
    their geometric mean. loss_agg_mode does not matter.
    """
    responses = len([mask for mask in response_mask if any(mask)])
    total: list[float] = []
    gradient = zeros(log_prob)
    for row, mask in enumerate(response_mask):
        if not any(mask):
            continue
        bounded: list[float] = []
        open_tokens: list[int] = []
        for t, here in enumerate(mask):
            if here:
                d = log_prob[row][t] - old_log_prob[row][t]
                cut = bounded_log_ratio(d, advantages[row][t], settings)
                bounded.append(cut)
                if cut == d:
                    open_tokens.append(t)
        weight = 1.0
        if rollout_is_weights is not None:
            weight = math.exp(mean([math.log(w) for w in kept(rollout_is_weights[row], mask)]))
        loss = -mean(kept(advantages[row], mask)) * math.exp(mean(bounded)) * weight
        total.append(loss)
        for t in open_tokens:
            gradient[row][t] = loss / len(bounded) / responses
    metrics = {"ppo_kl": mean_kl(old_log_prob, log_prob, response_mask, clamped=False)}
    return LossResult(mean(total), gradient, metrics)


def bounded_log_ratio(d: float, a: float, settings: Settings) -> float:
    if sign(a) > 0:
        return min(d, settings.clip_ratio_high)
    return max(d, -settings.clip_ratio_low) if sign(a) < 0 else 0.0


def covariances(advantages: Matrix, log_prob: Matrix, mask: Matrix) -> Matrix:
    """(A - mean A)(lp - mean lp)."""
    mean_a, mean_lp = masked_mean(advantages, mask), masked_mean(log_prob, mask)
    return each(lambda a, lp: (a - mean_a) * (lp - mean_lp), advantages, log_prob)


def clip_cov(
    old_log_prob: Matrix,
    log_prob: Matrix,
    advantages: Matrix,
    response_mask: Matrix,
    loss_agg_mode: str,
    settings: Settings,
    rollout_is_weights: Matrix | None = None,
) -> LossResult:
    """max(-A r, -A clip(r)), and 0 for chosen tokens.

    Eligible: not clipped, and lb < cov < ub. max(1, int(clip_cov_ratio N)) of the eligible are
    chosen at random; here only draws that leave no choice are allowed: all, or none there.
    """
    cov = covariances(advantages, log_prob, response_mask)
    losses, slopes = zeros(log_prob), zeros(log_prob)
    eligible = 0
    for row, mask in enumerate(response_mask):
        for t, here in enumerate(mask):
            lp, old, a = log_prob[row][t], old_log_prob[row][t], advantages[row][t]
            loss, slope = clip_without_dual(lp, old, a, settings)
            inside = settings.clip_cov_lb < cov[row][t] < settings.clip_cov_ub
            if here and inside and not loss > -a * math.exp(lp - old):
                eligible += 1
                continue
            losses[row][t], slopes[row][t] = loss, slope
    count = len(kept_of_all(log_prob, response_mask))
    if eligible > max(1, int(settings.clip_cov_ratio * count)):
        raise ValueError("the draw would be random")
    result = reduce_loss(losses, slopes, response_mask, loss_agg_mode, settings, rollout_is_weights)
    result.metrics["ppo_kl"] = mean_kl(old_log_prob, log_prob, response_mask, clamped=False)
    return result


def kl_cov(
    old_log_prob: Matrix,
    log_prob: Matrix,
    advantages: Matrix,
    response_mask: Matrix,
    loss_agg_mode: str,
    settings: Settings,
    rollout_is_weights: Matrix | None = None,
) -> LossResult:
    """-A r, plus ppo_kl_coef |d| for the max(1, int(kl_cov_ratio N)) tokens of largest cov.

    The metric ppo_kl is the mean of |d|.
    """
    cov = covariances(advantages, log_prob, response_mask)
    ranked = sorted(kept_of_all(cov, response_mask), reverse=True)
    chosen = max(1, int(settings.kl_cov_ratio * len(ranked)))
    bound = ranked[min(chosen, len(ranked)) - 1]
    losses, slopes = zeros(log_prob), zeros(log_prob)
    for row, mask in enumerate(response_mask):
        for t, here in enumerate(mask):
            d = log_prob[row][t] - old_log_prob[row][t]
            a = advantages[row][t]
            losses[row][t] = slopes[row][t] = -a * math.exp(d)
            if here and cov[row][t] >= bound:
                losses[row][t] += settings.ppo_kl_coef * abs(d)
                slopes[row][t] += settings.ppo_kl_coef * sign(d)
    result = reduce_loss(losses, slopes, response_mask, loss_agg_mode, settings, rollout_is_weights)
    distances = each(lambda lp, old: abs(lp - old), log_prob, old_log_prob)
    result.metrics["ppo_kl"] = masked_mean(distances, response_mask)
    return result
