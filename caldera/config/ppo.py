"""The whole configuration of a PPO run, under verl's key names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from caldera.config.actor import ActorConfig, RefConfig
from caldera.config.algorithm import AlgorithmConfig
from caldera.config.critic import CriticConfig
from caldera.config.data import DataConfig
from caldera.config.fields import mapping, nested, refused
from caldera.config.model import ModelConfig
from caldera.config.profiling import GlobalProfilerConfig
from caldera.config.reasons import NEEDS_RAY, NO_SEARCH
from caldera.config.reward import (
    CustomRewardFunctionConfig,
    RewardManagerConfig,
    RewardModelConfig,
)
from caldera.config.rollout import RolloutConfig
from caldera.config.trainer import TrainerConfig


@dataclass
class ActorRolloutRefConfig:
    hybrid_engine: bool = refused(True, "training and sampling share their devices")
    nccl_timeout: int = refused(600, NEEDS_RAY)
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
    enable: bool = refused(False, NEEDS_RAY)


@dataclass
class RayConfig:
    ray_init: dict[str, Any] = mapping(num_cpus=None)
    """Arguments of ray.init; a run in one process takes none."""
    timeline_json_file: str | None = refused(None, NEEDS_RAY)


@dataclass
class PPOTrainerConfig:
    data: DataConfig = nested(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = nested(ActorRolloutRefConfig)
    critic: CriticConfig = nested(CriticConfig)
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
