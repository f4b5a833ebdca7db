"""Advantages from rewards token by token: gae, reinforce_plus_plus, remax.

The three walk a response from its end to its start. A token with mask 0 (an observation, or
padding) is stepped over: what has been gathered so far is carried across it unchanged. A reward
that stands on such a token belongs to the nearest masked-in token before it; where there is
none, it belongs to nobody.

Each returns (advantages, returns), both 0 outside the mask.
"""

from __future__ import annotations

from .basics import Matrix, Row, masked_whiten, zeros


def settle(rewards: Row, mask: Row) -> Row:
    """Move each reward to the nearest masked-in token at or before it."""
    settled = [0.0 for _ in rewards]
    owner = -1
    for t, here in enumerate(mask):
        if here:
            owner = t
        if owner >= 0:
            settled[owner] += rewards[t]
    return settled


def gae(
    token_level_rewards: Matrix, values: Matrix, response_mask: Matrix, gamma: float, lam: float
) -> tuple[Matrix, Matrix]:
    """delta_t = r_t + gamma V_next - V_t;  A_t = delta_t + gamma lam A_next;  G_t = A_t + V_t.

    "next" is the next masked-in token; after the last one V and A are 0.
    The advantages are whitened over the mask; the returns are made before that.
    """
    advantages, returns = zeros(values), zeros(values)
    for row, mask in enumerate(response_mask):
        rewards = settle(token_level_rewards[row], mask)
        next_value = next_advantage = 0.0
        for t in reversed(range(len(mask))):
            if not mask[t]:
                continue
            delta = rewards[t] + gamma * next_value - values[row][t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[row][t]
            advantages[row][t] = next_advantage
            returns[row][t] = next_advantage + values[row][t]
    return masked_whiten(advantages, response_mask), returns


def discounted_returns(token_level_rewards: Matrix, mask: Matrix, gamma: float) -> Matrix:
    """G_t = r_t + gamma G_next, "next" being the next masked-in token."""
    returns = zeros(mask)
    for row, mask_row in enumerate(mask):
        rewards = settle(token_level_rewards[row], mask_row)
        running = 0.0
        for t in reversed(range(len(mask_row))):
            if mask_row[t]:
                running = rewards[t] + gamma * running
                returns[row][t] = running
    return returns


def reinforce_plus_plus(
    token_level_rewards: Matrix, response_mask: Matrix, gamma: float
) -> tuple[Matrix, Matrix]:
    """A = whiten(G), with G discounted by gamma."""
    returns = discounted_returns(token_level_rewards, response_mask, gamma)
    return masked_whiten(returns, response_mask), returns


def remax(
    token_level_rewards: Matrix, response_mask: Matrix, reward_baselines: list[float]
) -> tuple[Matrix, Matrix]:
    """A_t = G_t - b, with G undiscounted and b the score of the greedy answer."""
    returns = discounted_returns(token_level_rewards, response_mask, gamma=1.0)
    advantages = zeros(returns)
    for row, mask in enumerate(response_mask):
        for t, here in enumerate(mask):
            advantages[row][t] = (returns[row][t] - reward_baselines[row]) * here
    return advantages, returns
