"""KL estimates a token, KL in the reward, and the controllers of its coefficient.

    d = logprob - ref
    kl, k1           d                       slope 1
    abs              |d|                     slope sign(d)
    mse, k2          d^2 / 2                 slope d
    low_var_kl, k3   e^(-d) + d - 1          slope 1 - e^(-d)
                     exponent clamped to +-20, result clamped to +-10 (slope 0 beyond)

A name with a trailing + has the same value and the slope of k2.
"""

from __future__ import annotations

import math

from .basics import EPSILON, Matrix, clamp, each, kept, mean

TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


def kl_value(logprob: float, ref: float, kind: str) -> float:
    d = logprob - ref
    kind = kind.removesuffix("+")
    if kind in ("kl", "k1"):
        return d
    if kind == "abs":
        return abs(d)
    if kind in ("mse", "k2"):
        return d**2 / 2
    if kind in ("low_var_kl", "k3"):
        d = clamp(d, -20, 20)
        return clamp(math.exp(-d) + d - 1, -10, 10)
    raise ValueError(f"unknown kind of KL {kind}")


def kl_slope(logprob: float, ref: float, kind: str) -> float:
    d = logprob - ref
    if kind.endswith("+") or kind in ("mse", "k2"):
        return d
    if kind in ("kl", "k1"):
        return 1.0
    if kind == "abs":
        return float((d > 0) - (d < 0))
    if kind in ("low_var_kl", "k3"):
        return 1 - math.exp(-d) if abs(d) < 20 and math.exp(-d) + d - 1 < 10 else 0.0
    raise ValueError(f"unknown kind of KL {kind}")


def kl_penalty(logprob: Matrix, ref: Matrix, kind: str) -> tuple[Matrix, Matrix]:
    """(values, slopes with respect to logprob)."""
    return (
        each(lambda lp, r: kl_value(lp, r, kind), logprob, ref),
        each(lambda lp, r: kl_slope(lp, r, kind), logprob, ref),
    )


def kl_in_reward(
    token_level_scores: Matrix,
    old_log_probs: Matrix,
    ref_log_prob: Matrix,
    response_mask: Matrix,
    beta: float,
    kind: str,
) -> tuple[Matrix, float]:
    """r_t = s_t - beta kl_t mask_t, and mean over the batch of the mean over each response."""
    values = kl_penalty(old_log_probs, ref_log_prob, kind)[0]
    rewards = each(
        lambda s, kl, here: s - beta * kl * here, token_level_scores, values, response_mask
    )
    of_rows: list[float] = []
    for row, mask in zip(values, response_mask, strict=True):
        tokens = kept(row, mask)
        of_rows.append(math.fsum(tokens) / (len(tokens) + EPSILON))
    return rewards, mean(of_rows)


def adaptive_coefficients(
    start: float, target: float, horizon: float, steps: list[tuple[float, int]]
) -> list[float]:
    """value *= 1 + clip(kl / target - 1, +-0.2) n_steps / horizon; the value after each step."""
    value = start
    values: list[float] = []
    for current_kl, n_steps in steps:
        value *= 1 + clamp(current_kl / target - 1, -0.2, 0.2) * n_steps / horizon
        values.append(value)
    return values
