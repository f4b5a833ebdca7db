"""Advantages from one score a response, compared within its group.

    s = sum of all rewards of the response        g = the responses that share its uid
    mean_g, std_g = mean and unbiased standard deviation of s over g

Each function gives one advantage a response, which is written on each masked-in token of it.
Returns are equal to advantages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .basics import Matrix, groups, masked_whiten, mean, row_sums, spread, unbiased_std

GRPO_EPSILON = 1e-6


def grpo_scores(scores: Sequence[float], uid: Sequence[str], by_std: bool) -> list[float]:
    """(s - mean_g) / (std_g + 1e-6), or s - mean_g; alone in the group: mean 0, std 1."""
    result = [0.0 for _ in scores]
    for rows in groups(uid).values():
        members = [scores[row] for row in rows]
        middle = mean(members) if len(rows) > 1 else 0.0
        std = unbiased_std(members) if len(rows) > 1 else 1.0
        for row in rows:
            divisor = std + GRPO_EPSILON if by_std else 1.0
            result[row] = (scores[row] - middle) / divisor
    return result


def grpo(
    token_level_rewards: Matrix,
    response_mask: Matrix,
    uid: Sequence[str],
    norm_adv_by_std_in_grpo: bool,
) -> Matrix:
    scores = row_sums(token_level_rewards)
    return spread(grpo_scores(scores, uid, norm_adv_by_std_in_grpo), response_mask)


def grpo_passk(
    token_level_rewards: Matrix,
    response_mask: Matrix,
    uid: Sequence[str],
    norm_adv_by_std_in_grpo: bool,
) -> Matrix:
    """Best of the group: best - second best (over std_g + 1e-6 if normalised); the others: 0."""
    scores = row_sums(token_level_rewards)
    result = [0.0 for _ in scores]
    for rows in groups(uid).values():
        if len(rows) < 2:
            raise ValueError("grpo_passk needs two responses a group")
        members = [scores[row] for row in rows]
        ranked = sorted(members, reverse=True)
        winner = max(rows, key=lambda row: scores[row])
        result[winner] = ranked[0] - ranked[1]
        if norm_adv_by_std_in_grpo:
            result[winner] /= unbiased_std(members) + GRPO_EPSILON
    return spread(result, response_mask)


def reinforce_plus_plus_baseline(
    token_level_rewards: Matrix, response_mask: Matrix, uid: Sequence[str]
) -> Matrix:
    """whiten(s - mean_g) over all tokens of the batch; alone in the group: mean 0."""
    scores = row_sums(token_level_rewards)
    centred = grpo_scores(scores, uid, by_std=False)
    return masked_whiten(spread(centred, response_mask), response_mask)


def rloo(
    token_level_rewards: Matrix, response_mask: Matrix, uid: Sequence[str], alone_gets_score: bool
) -> Matrix:
    """n / (n - 1) (s - mean_g), which is s minus the mean of the others.

    Alone in the group: s in `rloo`, 0 in `rloo_vectorized`.
    """
    scores = row_sums(token_level_rewards)
    result = [0.0 for _ in scores]
    for rows in groups(uid).values():
        for row in rows:
            others = [scores[other] for other in rows if other != row]
            if others:
                result[row] = scores[row] - mean(others)
            elif alone_gets_score:
                result[row] = scores[row]
    return spread(result, response_mask)


def opo(token_level_rewards: Matrix, response_mask: Matrix, uid: Sequence[str]) -> Matrix:
    """s - sum_g(len s) / sum_g(len), with len the count of masked-in tokens.

    Alone in the group: baseline 0.
    """
    scores = row_sums(token_level_rewards)
    lengths = row_sums(response_mask)
    result = [0.0 for _ in scores]
    for rows in groups(uid).values():
        total = math.fsum(lengths[row] for row in rows)
        baseline = 0.0
        if len(rows) > 1 and total > 0:
            baseline = math.fsum(lengths[row] * scores[row] for row in rows) / total
        for row in rows:
            result[row] = scores[row] - baseline
    return spread(result, response_mask)


def gpg(token_level_rewards: Matrix, response_mask: Matrix, uid: Sequence[str]) -> Matrix:
    """alpha (s - mean_g), alpha = B / max(1, count of s != 0); alone in the group: mean 0."""
    scores = row_sums(token_level_rewards)
    alpha = len(scores) / max(1, sum(1 for s in scores if s != 0))
    centred = grpo_scores(scores, uid, by_std=False)
    return spread([alpha * c for c in centred], response_mask)


def gdpo(
    components: dict[str, list[float]],
    weights: Sequence[float],
    response_mask: Matrix,
    uid: Sequence[str],
) -> Matrix:
    """whiten(sum_k weight_k grpo(component_k)) over all tokens of the batch."""
    total = [0.0 for _ in response_mask]
    for weight, scores in zip(weights, components.values(), strict=True):
        for row, advantage in enumerate(grpo_scores(scores, uid, by_std=True)):
            total[row] += weight * advantage
    return masked_whiten(spread(total, response_mask), response_mask)


def maxrl(token_level_rewards: Matrix, response_mask: Matrix, uid: Sequence[str]) -> Matrix:
    """(s - mean_g) / (mean_g + 1e-6); 0 where mean_g <= 0 and where the group is one response."""
    scores = row_sums(token_level_rewards)
    result = [0.0 for _ in scores]
    for rows in groups(uid).values():
        middle = mean([scores[row] for row in rows])
        for row in rows:
            if len(rows) > 1 and middle > 0:
                result[row] = (scores[row] - middle) / (middle + GRPO_EPSILON)
    return spread(result, response_mask)
