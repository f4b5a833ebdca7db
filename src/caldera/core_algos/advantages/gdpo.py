"""GDPO: several rewards, each normalised by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from caldera.core_algos.advantages.base import AdvantageEstimator, Uids, register_adv_est
from caldera.core_algos.advantages.group_relative import EPSILON, Groups, relative_to_group
from caldera.core_algos.advantages.tokens import count_tokens, spread, whiten_responses
from caldera.errors import ConfigError, RewardError

if TYPE_CHECKING:
    from caldera.config.algorithm import AlgorithmConfig

Columns = Mapping[str, np.ndarray[Any, Any]]


@register_adv_est(AdvantageEstimator.GDPO, needs_group=True)
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,  # (B, R)
    response_mask: Tensor,  # (B, R)
    index: Uids,  # (B,)
    non_tensor_batch: Columns,
    config: AlgorithmConfig,
    epsilon: float = EPSILON,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Normalise each of `gdpo_reward_keys` within its group as GRPO does; whiten the weighted sum.

    The rewards are the scorer's values of these keys; of `token_level_rewards` only shape and
    dtype are used. The returns are the advantages.
    """
    groups = Groups.from_uids(index, token_level_rewards)
    total = torch.zeros(len(groups.ids), dtype=torch.float64, device=groups.ids.device)  # (B,)
    for key, weight in _keys_and_weights(config):
        scores = _column(non_tensor_batch, key).to(total.device)
        normalise = config.norm_adv_by_std_in_grpo
        total += weight * relative_to_group(scores, groups, normalise, epsilon)
    whitened = whiten_responses(total, count_tokens(response_mask))
    advantages = spread(whitened, response_mask, token_level_rewards.dtype)
    return advantages, advantages


def _keys_and_weights(config: AlgorithmConfig) -> list[tuple[str, float]]:
    keys, weights = config.gdpo_reward_keys, config.gdpo_reward_weights
    if not keys:
        raise ConfigError(
            "algorithm.adv_estimator='gdpo' needs algorithm.gdpo_reward_keys: the names of values"
            " that the scorer returns"
        )
    if weights is None:
        weights = [1.0] * len(keys)
    if len(weights) != len(keys):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights holds {len(weights)} numbers for the {len(keys)} keys"
            " of algorithm.gdpo_reward_keys"
        )
    return list(zip(keys, weights, strict=True))


def _column(columns: Columns, key: str) -> Tensor:
    """(B,) float64: what the scorer returned under this key."""
    if key not in columns:
        raise ConfigError(
            f"algorithm.gdpo_reward_keys names {key!r}, which the scorer does not return"
            f" (the batch holds: {', '.join(sorted(columns))})"
        )
    for row, value in enumerate(columns[key]):
        if not isinstance(value, int | float | np.number | np.bool_):
            raise RewardError(
                f"algorithm.gdpo_reward_keys names {key!r}, which is {value!r} and no number for"
                f" sample {row}"
            )
    return torch.from_numpy(columns[key].astype(np.float64))
