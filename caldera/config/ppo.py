"""The whole configuration of a PPO run, under verl's key names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from caldera.config.actor import ActorConfig, RefConfig
from caldera.config.algorithm import AlgorithmConfig
from caldera.config.critic import CriticConfig
from caldera.config.data import DataConfig
from caldera.config.fields import ConfigGroup, mapping, nested, option, refused
from caldera.config.model import ModelConfig
from caldera.config.profiling import GlobalProfilerConfig
from caldera.config.reasons import NO_SEARCH, NO_TRANSFER
from caldera.config.reward import (
    CustomRewardFunctionConfig,
    RewardConfig,
    RewardManagerConfig,
    RewardModelConfig,
)
from caldera.config.rollout import RolloutConfig
from caldera.config.trainer import TrainerConfig


@dataclass
class ActorRolloutRefConfig(ConfigGroup):
    hybrid_engine: bool = refused(True, "training and sampling share their devices")
    nccl_timeout: int = option(600, minimum=1, unit="seconds")
    """How long a call may take on the workers, of all roles, and a rank wait for another."""
    model: ModelConfig = nested(ModelConfig)
    actor: ActorConfig = nested(ActorConfig)
    ref: RefConfig = nested(RefConfig)
    rollout: RolloutConfig = nested(RolloutConfig)


@dataclass
class RetrieverConfig:
    url: str | None = refused(None, NO_SEARCH)
    topk: int = refused(3, NO_SEARCH)


@dataclass
class TransferQueueConfig:
    enable: bool = refused(False, NO_TRANSFER)


@dataclass
class RayConfig:
    ray_init: dict[str, Any] = mapping(num_cpus=None)
    """Arguments of ray.init."""
    timeline_json_file: str | None = None
    """File for Ray's timeline of the run; null: none."""


@dataclass
class PPOTrainerConfig(ConfigGroup):
    data: DataConfig = nested(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = nested(ActorRolloutRefConfig)
    critic: CriticConfig = nested(CriticConfig)
    reward: RewardConfig = nested(RewardConfig)
    reward_model: RewardModelConfig = nested(RewardModelConfig)
    reward_manager: RewardManagerConfig = nested(RewardManagerConfig)
    custom_reward_function: CustomRewardFunctionConfig = nested(CustomRewardFunctionConfig)
    algorithm: AlgorithmConfig = nested(AlgorithmConfig)
    trainer: TrainerConfig = nested(TrainerConfig)
    global_profiler: GlobalProfilerConfig = nested(GlobalProfilerConfig)
    transfer_queue: TransferQueueConfig = nested(TransferQueueConfig)
    ray_kwargs: RayConfig = nested(RayConfig)
    do_search: bool = refused(False, NO_SEARCH)
    max_turns: int = refused(1, NO_SEARCH)
    retriever: RetrieverConfig = nested(RetrieverConfig)
