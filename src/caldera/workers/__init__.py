"""The roles: what a rank holds and does."""

from __future__ import annotations

from caldera.workers.actor_rollout_ref import ActorRolloutRefWorker
from caldera.workers.critic import CriticWorker
from caldera.workers.generation import GenerationWorker
from caldera.workers.policy import ON_ACTOR, PolicyWorker
from caldera.workers.reward_model import RewardModelWorker
from caldera.workers.sampler import ON_SAMPLER, SamplerWorker
from caldera.workers.supervised import SupervisedWorker

__all__ = [
    "ON_ACTOR",
    "ON_SAMPLER",
    "ActorRolloutRefWorker",
    "CriticWorker",
    "GenerationWorker",
    "PolicyWorker",
    "RewardModelWorker",
    "SamplerWorker",
    "SupervisedWorker",
]
