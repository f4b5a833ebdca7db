"""Weights and rejection for the difference between the trained and the sampling policy.

    l = old_log_prob (trainer) - rollout_log_prob (sampler), a token, clamped to +-20
    Exponents, too, are clamped to +-20.

Importance weights
    token      e^l                        sequence   e^(sum of l), on each token of the response
    threshold u        weights above u become u
    threshold lo_hi    weights outside [lo, hi] become 0
    batch_normalize    then divided by their mean: over tokens for `token`, over responses that
                       have a token for `sequence`

Rejection, by statistics a token or a response
    k1 = -l      k2 = l^2 / 2      k3 = e^l - 1 - l
    token_k*: of the token; seq_sum_k*, seq_mean_k*, seq_max_k*: over the tokens of the response
    k1: bounds of the ratio, lo <= e^(-k1) <= hi, where one number u stands for 1/u .. u
    k2, k3: at most the threshold
What is rejected gets mask 0; with several statistics, all must pass.
"""

from __future__ import annotations

import math

from .basics import Matrix, clamp, each, kept, kept_of_all, mean, zeros

BOUND = 20.0
STATISTICS = (
    *(f"token_k{i}" for i in (1, 2, 3)),
    *(f"seq_sum_k{i}" for i in (1, 2, 3)),
    *(f"seq_mean_k{i}" for i in (1, 2, 3)),
    *(f"seq_max_k{i}" for i in (2, 3)),
)


def safe_exp(x: float) -> float:
    return math.exp(clamp(x, -BOUND, BOUND))


def log_ratios(old_log_prob: Matrix, rollout_log_prob: Matrix) -> Matrix:
    return each(
        lambda old, rollout: clamp(old - rollout, -BOUND, BOUND), old_log_prob, rollout_log_prob
    )


def is_weights(
    old_log_prob: Matrix,
    rollout_log_prob: Matrix,
    response_mask: Matrix,
    level: str,
    threshold: str,
    batch_normalize: bool,
) -> Matrix:
    """Weights, 0 outside the mask."""
    ratios = log_ratios(old_log_prob, rollout_log_prob)
    weights = zeros(ratios)
    of_responses: list[float] = []
    for row, mask in enumerate(response_mask):
        whole = bounded_weight(safe_exp(math.fsum(kept(ratios[row], mask))), threshold)
        if any(mask):
            of_responses.append(whole)
        for t, here in enumerate(mask):
            if here:
                alone = bounded_weight(safe_exp(ratios[row][t]), threshold)
                weights[row][t] = alone if level == "token" else whole
    if batch_normalize:
        tokens = kept_of_all(weights, response_mask)
        middle = mean(tokens if level == "token" else of_responses)
        weights = each(lambda w: w / middle, weights)
    return weights


def bounded_weight(weight: float, threshold: str) -> float:
    if "_" in threshold:
        low, high = (float(part) for part in threshold.split("_"))
        return weight if low <= weight <= high else 0.0
    return min(weight, float(threshold))


def token_statistic(log_ratio: float, kind: str) -> float:
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    return safe_exp(log_ratio) - 1 - log_ratio


def statistics_of(ratios: list[float], mask: list[float], option: str) -> list[float]:
    """The statistic that decides over each token of one response; 0 outside the mask."""
    level, kind = option.rsplit("_", 1)
    values = [token_statistic(x, kind) for x in ratios]
    tokens = kept(values, mask)
    if not tokens:
        return [0.0 for _ in mask]
    if level == "token":
        return [value * here for value, here in zip(values, mask, strict=True)]
    whole = {"seq_sum": math.fsum(tokens), "seq_mean": mean(tokens), "seq_max": max(tokens)}[level]
    return [whole * here for here in mask]


def passes(statistic: float, option: str, threshold: str) -> bool:
    if not option.endswith("k1"):
        return statistic <= float(threshold)
    if "_" in threshold:
        low, high = (float(part) for part in threshold.split("_"))
    else:
        low, high = 1 / float(threshold), float(threshold)
    return math.log(low) <= -statistic <= math.log(high)


def rejection_mask(
    old_log_prob: Matrix,
    rollout_log_prob: Matrix,
    response_mask: Matrix,
    rollout_rs: str,
    rollout_rs_threshold: str,
) -> Matrix:
    """The response mask without what was rejected."""
    options = rollout_rs.split(",")
    thresholds = rollout_rs_threshold.split(",")
    if len(thresholds) == 1:
        thresholds *= len(options)
    ratios = log_ratios(old_log_prob, rollout_log_prob)
    result = zeros(response_mask)
    for row, mask in enumerate(response_mask):
        result[row] = list(mask)
        for option, threshold in zip(options, thresholds, strict=True):
            statistics = statistics_of(ratios[row], mask, option)
            for t, statistic in enumerate(statistics):
                if not passes(statistic, option, threshold):
                    result[row][t] = 0.0
    return result


def masked_fraction(response_mask: Matrix, modified: Matrix) -> float:
    """Share of the tokens that were rejected."""
    count = len(kept_of_all(response_mask, response_mask))
    return 1 - len(kept_of_all(modified, modified)) / count
