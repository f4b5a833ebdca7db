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
from caldera.config.reasons import NO_TRANSFER
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
    worker_class: str | None = None
    """The worker of this role: a name that is registered, or a class derived from
    ActorRolloutRefWorker, as my.module.MyWorker or path/to/file.py:MyWorker; null: that one."""
    nccl_timeout: int = option(600, minimum=1, unit="seconds")
    """How long a call may take on the workers, of all roles, and a rank wait for another."""
    model: ModelConfig = nested(ModelConfig)
    actor: ActorConfig = nested(ActorConfig)
    ref: RefConfig = nested(RefConfig)
    rollout: RolloutConfig = nested(RolloutConfig)


@dataclass
class RetrieverConfig:
    """The service that search_agent asks."""

    url: str | None = None
    """Its address, such as http://127.0.0.1:8000/retrieve."""
    topk: int = option(3, minimum=1, unit="passages")
    """Passages that a search brings."""


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
    custom: dict[str, Any] = mapping()
    """Keys for custom code, such as custom.my_threshold=0.5: trainers and agent loops read
    `config.custom`, data sets `config.custom` of theirs, score functions and reward managers a
    parameter named `custom`."""
    do_search: bool = False
    """Sample by search_agent, with Search-R1's keys; rollout.response_length is then that of all
    turns together."""
    max_turns: int = option(1, minimum=1, unit="turns")
    """search_agent: turns in which the policy may search; one more follows, for the answer."""
    retriever: RetrieverConfig = nested(RetrieverConfig)
