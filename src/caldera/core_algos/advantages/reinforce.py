"""REINFORCE with the baseline of a batch, of a greedy response, or the optimal one of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from caldera.config.estimators import AdvantageEstimator
from caldera.core_algos.advantages.base import Uids, register_adv_est
from caldera.core_algos.advantages.gae import reverse_scan
from caldera.core_algos.advantages.group_relative import Groups, means_of_several, of_scores
from caldera.core_algos.advantages.tokens import (
    KeptTokens,
    Moments,
    block_height,
    count_tokens,
    in_row_blocks,
    whiten_in_place,
    whiten_responses,
)

if TYPE_CHECKING:
    from caldera.config.algorithm import AlgorithmConfig


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor,  # (B, R)
    response_mask: Tensor,  # (B, R)
    config: AlgorithmConfig,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The discounted return of each token, whitened over the batch; no critic, no groups.

    Tokens outside the mask discount nothing; a reward on one of them counts as one on the nearest
    earlier token of the mask.
    """

    def rows(rewards: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        tokens = KeptTokens(mask)
        returns = tokens.unpack(reverse_scan(tokens.pack_rewards(rewards), config.gamma))
        return returns, tokens.mask, *Moments.of(returns, tokens.mask)

    returns, mask, *moments = in_row_blocks(rows, token_level_rewards, response_mask)
    return whiten_in_place(returns.clone(), mask, Moments(*moments)), returns


@of_scores(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE)
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    scores: Tensor, groups: Groups, response_mask: Tensor, **_: Any
) -> Tensor:
    """Each response's score less the mean of its group, whitened over all tokens of the batch.

    A group of one has mean 0.
    """
    centred = scores - means_of_several(scores, groups)
    return whiten_responses(centred, count_tokens(response_mask))


@register_adv_est(AdvantageEstimator.REMAX)
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,  # (B, R)
    reward_baselines: Tensor,  # (B,)
    response_mask: Tensor,  # (B, R)
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Each token's reward-to-go less the score of the greedy response to the same prompt.

    A reward outside the mask counts as one on the nearest earlier token of the mask. The returns
    are the rewards-to-go.
    """

    def rows(rewards: Tensor, mask: Tensor, baselines: Tensor) -> tuple[Tensor, Tensor]:
        tokens = KeptTokens(mask)
        returns = tokens.unpack(reverse_scan(tokens.pack_rewards(rewards), 1.0))
        return tokens.zero_outside(returns - baselines.unsqueeze(-1)), returns

    baselines = reward_baselines.to(token_level_rewards)
    advantages, returns = in_row_blocks(rows, token_level_rewards, response_mask, baselines)
    return advantages, returns


_EPSILON = 1e-8


@register_adv_est(AdvantageEstimator.OPTIMAL_TOKEN_BASELINE)
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,  # (B, R), as are all tensors here
    response_mask: Tensor,
    index: Uids,  # (B,)
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    epsilon: float = _EPSILON,
    packed: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The reward-to-go less the optimal baseline of the group at the same position.

    Where a group's longest trajectory is alone, beyond the end of the second longest, its baseline
    is 0; so is that of a group of one. A reward outside the mask counts as one on the nearest
    earlier token of the mask. `rollout_is_weights`, squared, multiply W_t. The returns are the
    rewards-to-go. `packed` compares n-th actions, not n-th positions: tokens of tools and users
    are taken out of every trajectory before these are compared.
    """
    tensors = (token_level_rewards, response_mask, old_log_probs, sum_pi_squared)
    trajectories = _Trajectories(*tensors, rollout_is_weights)
    groups = Groups.from_uids(index, token_level_rewards)
    advantages, returns = (
        torch.empty_like(token_level_rewards),
        torch.empty_like(token_level_rewards),
    )
    for rows in groups.blocks(block_height(token_level_rewards)):
        members = Groups.from_uids(groups.ids[rows], rows)
        parts = _of_groups(trajectories.take(rows), members, epsilon, packed)
        advantages.index_copy_(0, rows, parts[0])
        returns.index_copy_(0, rows, parts[1])
    return advantages, returns


compute_tir_optimal_token_baseline_advantage = register_adv_est(
    AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE
)(partial(compute_optimal_token_baseline_advantage, packed=True))
"""For several turns."""


@dataclass(frozen=True, eq=False)
class _Trajectories:
    rewards: Tensor  # (B, R), as are all tensors here
    mask: Tensor
    old_log_probs: Tensor
    sum_pi_squared: Tensor
    rollout_is_weights: Tensor | None

    def take(self, rows: Tensor) -> _Trajectories:
        tensors = {key: value for key, value in vars(self).items() if value is not None}
        return replace(self, **{key: value.index_select(0, rows) for key, value in tensors.items()})


def _of_groups(
    trajectories: _Trajectories, groups: Groups, epsilon: float, packed: bool
) -> tuple[Tensor, Tensor]:
    tokens = KeptTokens(trajectories.mask)
    lay_out = tokens.pack if packed else tokens.zero_outside
    alive = tokens.packed_mask() if packed else tokens.mask

    energy = trajectories.old_log_probs.exp().mul_(-2).add_(1).add_(trajectories.sum_pi_squared)
    weight = lay_out(energy.clamp_(min=0)).cumsum(-1)  # rounding makes no square negative
    if trajectories.rollout_is_weights is not None:
        weight *= lay_out(trajectories.rollout_is_weights).square_()
    weight = torch.where(alive, weight, 0)

    to_go = reverse_scan(tokens.pack_rewards(trajectories.rewards), 1.0)
    to_go = to_go if packed else tokens.unpack(to_go)
    baselines = groups.sum(weight * to_go) / (groups.sum(weight) + epsilon)  # (G, R)
    baselines = torch.where(_at_least_two(alive, groups), baselines, 0)
    advantages = torch.where(alive, to_go - baselines.index_select(0, groups.ids), 0)
    return (tokens.unpack(advantages), tokens.unpack(to_go)) if packed else (advantages, to_go)


def _at_least_two(alive: Tensor, groups: Groups) -> Tensor:
    """(G, R): up to where the second longest trajectory of a group ends."""
    ends = torch.arange(1, alive.shape[-1] + 1, dtype=torch.int32, device=alive.device)
    lengths = torch.where(alive, ends, 0).amax(-1)  # (B,)
    _, second = groups.first_two(lengths)
    second_lengths = lengths[second].masked_fill(groups.single, 0)  # (G,)
    return ends <= second_lengths.unsqueeze(-1)
