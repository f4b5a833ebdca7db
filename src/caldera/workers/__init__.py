"""The roles: what a rank holds and does."""

from __future__ import annotations

from caldera.workers.actor_rollout_ref import ActorRolloutRefWorker
from caldera.workers.critic import CriticWorker
from caldera.workers.reward_model import RewardModelWorker
from caldera.workers.sampler import SamplerWorker
from caldera.workers.supervised import SupervisedWorker

__all__ = [
    "ActorRolloutRefWorker",
    "CriticWorker",
    "RewardModelWorker",
    "SamplerWorker",
    "SupervisedWorker",
]
