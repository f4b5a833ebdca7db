"""Generalised advantage estimation, with a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from caldera.core_algos.advantages.base import AdvantageEstimator, register_adv_est
from caldera.core_algos.advantages.scan import reverse_scan
from caldera.core_algos.advantages.tokens import (
    KeptTokens,
    Moments,
    in_row_blocks,
    whiten_in_place,
)

if TYPE_CHECKING:
    from caldera.config.algorithm import AlgorithmConfig


@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor,  # (B, R)
    values: Tensor,  # (B, R)
    response_mask: Tensor,  # (B, R)
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the tokens of the mask, as if they were adjacent.

    Tool and user tokens amid a response are no actions: the recursion passes over them, and a
    reward on one of them counts as one on the nearest earlier action. The returns are advantage +
    value; the advantages are then whitened.
    """

    def rows(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        tokens = KeptTokens(mask)
        packed_values = tokens.pack(values)
        deltas = tokens.pack_rewards(rewards).sub_(packed_values)
        deltas[:, :-1].add_(packed_values[:, 1:], alpha=gamma)
        packed_advantages = reverse_scan(deltas, gamma * lam)
        advantages = tokens.unpack(packed_advantages)
        returns = tokens.unpack(packed_values.add_(packed_advantages))
        return advantages, returns, tokens.mask, *Moments.of(advantages, tokens.mask)

    advantages, returns, mask, *moments = in_row_blocks(
        rows, token_level_rewards, values, response_mask
    )
    return whiten_in_place(advantages, mask, Moments(*moments)), returns


@register_adv_est(AdvantageEstimator.GAE)
def _gae(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    config: AlgorithmConfig,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    return compute_gae_advantage_return(
        token_level_rewards, values, response_mask, gamma=config.gamma, lam=config.lam
    )
