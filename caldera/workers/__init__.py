"""The roles: what a rank holds and does."""

from __future__ import annotations

from caldera.workers.actor_rollout_ref import ActorRolloutRefWorker
from caldera.workers.critic import CriticWorker
from caldera.workers.reward_model import RewardModelWorker

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"]
