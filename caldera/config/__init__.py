"""Typed configuration: dataclasses with every key and default, and the loader."""

from __future__ import annotations

from caldera.config.actor import ActorConfig, RefConfig
from caldera.config.algorithm import AlgorithmConfig, KLControlConfig
from caldera.config.critic import CriticConfig
from caldera.config.data import DataConfig
from caldera.config.loader import (
    CONFIG_DIR,
    compose_config,
    config_to_dict,
    config_to_yaml,
    known_keys,
    load_config,
)
from caldera.config.model import (
    CheckpointConfig,
    CriticModelConfig,
    FSDPConfig,
    ModelConfig,
    OptimizerConfig,
)
from caldera.config.ppo import ActorRolloutRefConfig, PPOTrainerConfig
from caldera.config.rollout import RolloutConfig, ValKwargs
from caldera.config.trainer import TrainerConfig
from caldera.config.validate import needs_critic, needs_reference, resolve_for_machine

__all__ = [
    "CONFIG_DIR",
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "CriticConfig",
    "CriticModelConfig",
    "DataConfig",
    "FSDPConfig",
    "KLControlConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PPOTrainerConfig",
    "RefConfig",
    "RolloutConfig",
    "TrainerConfig",
    "ValKwargs",
    "compose_config",
    "config_to_dict",
    "config_to_yaml",
    "known_keys",
    "load_config",
    "needs_critic",
    "needs_reference",
    "resolve_for_machine",
]
