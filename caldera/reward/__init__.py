"""From generated answers to rewards: reward managers and the user's own score functions."""

from __future__ import annotations

from caldera.reward.custom import get_custom_reward_fn
from caldera.reward.dapo import DAPORewardManager
from caldera.reward.loading import load_reward_manager
from caldera.reward.manager import (
    REWARD_MANAGERS,
    NaiveRewardManager,
    RewardManager,
    compute_reward,
)

__all__ = [
    "REWARD_MANAGERS",
    "DAPORewardManager",
    "NaiveRewardManager",
    "RewardManager",
    "compute_reward",
    "get_custom_reward_fn",
    "load_reward_manager",
]
