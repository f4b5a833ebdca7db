"""REINFORCE with returns of single tokens or with whitened scores; no critic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from caldera.core_algos.advantages.base import AdvantageEstimator, Uids, register_adv_est
from caldera.core_algos.advantages.gae import reverse_scan
from caldera.core_algos.advantages.group_relative import Groups
from caldera.core_algos.advantages.tokens import (
    KeptTokens,
    Moments,
    count_tokens,
    in_row_blocks,
    spread,
    sum_scores,
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


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE, needs_group=True)
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,  # (B, R)
    response_mask: Tensor,  # (B, R)
    index: Uids,  # (B,)
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Each response's score less the mean of its group, whitened over all tokens of the batch.

    A group of one has mean 0. The returns are the advantages.
    """
    scores = sum_scores(token_level_rewards, response_mask)
    groups = Groups.from_uids(index, scores)
    centred = scores - groups.mean(scores).masked_fill(groups.single, 0)[groups.ids]
    whitened = whiten_responses(centred, count_tokens(response_mask))
    advantages = spread(whitened, response_mask, token_level_rewards.dtype)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.REMAX)
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,  # (B, R)
    reward_baselines: Tensor,  # (B,)
    response_mask: Tensor,  # (B, R)
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Each token's reward-to-go less the score of the greedy answer to the same prompt.

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
