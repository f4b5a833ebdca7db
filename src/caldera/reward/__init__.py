"""From responses to rewards: reward managers and custom score functions."""

from __future__ import annotations

from caldera.reward.answer_formats import AnswerFormats
from caldera.reward.custom import get_custom_reward_fn
from caldera.reward.loading import load_reward_manager
from caldera.reward.manager import (
    OUTCOMES,
    REWARD_MANAGERS,
    NaiveRewardManager,
    RewardManager,
    compute_reward,
    is_built_in,
)
from caldera.reward.managers import (
    BatchRewardManager,
    DAPORewardManager,
    GDPORewardManager,
    LimitedRewardManager,
)
from caldera.reward.prime import PrimeRewardManager, RemoteRewardManager
from caldera.reward.samples import FAILED, TIMED_OUT, VALUE, Outcome
from caldera.reward.streaming import ROWS, StreamingScorer, streams

__all__ = [
    "FAILED",
    "OUTCOMES",
    "REWARD_MANAGERS",
    "ROWS",
    "TIMED_OUT",
    "VALUE",
    "AnswerFormats",
    "BatchRewardManager",
    "DAPORewardManager",
    "GDPORewardManager",
    "LimitedRewardManager",
    "NaiveRewardManager",
    "Outcome",
    "PrimeRewardManager",
    "RemoteRewardManager",
    "RewardManager",
    "StreamingScorer",
    "compute_reward",
    "get_custom_reward_fn",
    "is_built_in",
    "load_reward_manager",
    "streams",
]
