"""Typed configuration: dataclasses with every key and default, and the loader."""

from __future__ import annotations

from caldera.config.actor import ActorConfig, RefConfig
from caldera.config.algorithm import AlgorithmConfig, KLControlConfig
from caldera.config.critic import CriticConfig
from caldera.config.data import DataConfig
from caldera.config.estimators import needs_critic, needs_reference
from caldera.config.loader import (
    CONFIG_DIR,
    compose_config,
    config_to_dict,
    config_to_yaml,
    known_keys,
    load_config,
    load_supervised_config,
)
from caldera.config.machine import resolve_for_machine, uses_ray
from caldera.config.megatron import MegatronConfig
from caldera.config.model import CriticModelConfig, ModelConfig
from caldera.config.optim import CheckpointConfig, FSDPConfig, OptimizerConfig
from caldera.config.ppo import ActorRolloutRefConfig, PPOTrainerConfig
from caldera.config.reference import SHORT_PROFILE, annotated_yaml, help_text
from caldera.config.reward import RewardModelConfig
from caldera.config.rollout import RolloutConfig, ValKwargs
from caldera.config.sft import SFTDataConfig, SFTTrainerConfig, resolve_supervised
from caldera.config.suggest import did_you_mean
from caldera.config.trainer import RunKeys, TrainerConfig

__all__ = [
    "CONFIG_DIR",
    "SHORT_PROFILE",
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "CriticConfig",
    "CriticModelConfig",
    "DataConfig",
    "FSDPConfig",
    "KLControlConfig",
    "MegatronConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PPOTrainerConfig",
    "RefConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RunKeys",
    "SFTDataConfig",
    "SFTTrainerConfig",
    "TrainerConfig",
    "ValKwargs",
    "annotated_yaml",
    "compose_config",
    "config_to_dict",
    "config_to_yaml",
    "did_you_mean",
    "help_text",
    "known_keys",
    "load_config",
    "load_supervised_config",
    "needs_critic",
    "needs_reference",
    "resolve_for_machine",
    "resolve_supervised",
    "uses_ray",
]
