"""Advantages against the baseline of least variance, token by token.

    G_t = sum of the rewards from t on
    w_t = 1 - 2 pi_t + (sum over the vocabulary of pi^2)
    W_t = w_1 + ... + w_t over masked-in tokens, times rho_t^2 with importance weights rho
    b_t = sum_g G_t W_t / sum_g W_t, over the responses of the group that have a token t
    A_t = G_t - b_t

Where only one response of the group is the longest, its tokens beyond the second longest have
nothing to be compared with: b = 0 there. So it is, too, for a response alone in its group.

`optimal_token_baseline` takes t as the position in the response; it is meant for responses
without observation tokens. `tir_optimal_token_baseline` takes t as the count of masked-in
tokens so far, so that the same step of two responses with tool calls is compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from .basics import Matrix, Row, groups, zeros


def reward_to_go(rewards: Row) -> Row:
    return [math.fsum(rewards[t:]) for t in range(len(rewards))]


def cumulative_weight(probabilities: Row, sum_pi_squared: Row, rho: Row) -> Row:
    w = [1 - 2 * pi + squared for pi, squared in zip(probabilities, sum_pi_squared, strict=True)]
    return [math.fsum(w[: t + 1]) * rho[t] ** 2 for t in range(len(w))]


def tir_optimal_token_baseline(
    token_level_rewards: Matrix,
    response_mask: Matrix,
    uid: Sequence[str],
    old_log_probs: Matrix,
    sum_pi_squared: Matrix,
    rollout_is_weights: Matrix | None = None,
) -> tuple[Matrix, Matrix]:
    """(advantages, returns), both 0 outside the mask."""
    advantages, returns = zeros(response_mask), zeros(response_mask)
    for rows in groups(uid).values():
        # Of each response, its masked-in tokens alone: their places, then G and W by step.
        places = {r: [t for t, here in enumerate(response_mask[r]) if here] for r in rows}
        gains: dict[int, Row] = {}
        weights: dict[int, Row] = {}
        for r in rows:
            gains[r] = reward_to_go([token_level_rewards[r][t] for t in places[r]])
            weights[r] = cumulative_weight(
                [math.exp(old_log_probs[r][t]) for t in places[r]],
                [sum_pi_squared[r][t] for t in places[r]],
                [rollout_is_weights[r][t] if rollout_is_weights else 1.0 for t in places[r]],
            )
        for step in range(max(len(places[r]) for r in rows)):
            present = [r for r in rows if len(places[r]) > step]
            baseline = 0.0
            total = math.fsum(weights[r][step] for r in present)
            if len(present) > 1 and total > 0:
                baseline = math.fsum(gains[r][step] * weights[r][step] for r in present) / total
            for r in present:
                advantages[r][places[r][step]] = gains[r][step] - baseline
                returns[r][places[r][step]] = gains[r][step]
    return advantages, returns


def optimal_token_baseline(
    token_level_rewards: Matrix,
    response_mask: Matrix,
    uid: Sequence[str],
    old_log_probs: Matrix,
    sum_pi_squared: Matrix,
    rollout_is_weights: Matrix | None = None,
) -> tuple[Matrix, Matrix]:
    """The same on responses without observation tokens, where position and step are one."""
    for mask in response_mask:
        if any(later > earlier for earlier, later in itertools.pairwise(mask)):
            raise ValueError("observation tokens: position and step differ")
    return tir_optimal_token_baseline(
        token_level_rewards, response_mask, uid, old_log_probs, sum_pi_squared, rollout_is_weights
    )
