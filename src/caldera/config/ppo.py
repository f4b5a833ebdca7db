"""The whole configuration of a PPO run, under verl's key names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from caldera.config.actor import ActorConfig, RefConfig
from caldera.config.algorithm import AlgorithmConfig
from caldera.config.critic import CriticConfig
from caldera.config.data import DataConfig
from caldera.config.fields import ConfigGroup, mapping, nested, option, refused, shown
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
from caldera.errors import ConfigError


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
    do_search: bool | None = None
    """Sample by search_agent, with Search-R1's keys; rollout.response_length is then that of all
    turns together. null: where retriever.url is set, and data.max_start_length or
    actor_rollout_ref.actor.state_masking."""
    max_turns: int = option(1, minimum=1, unit="turns")
    """search_agent: turns in which the policy may search; one more follows, for the answer."""
    retriever: RetrieverConfig = nested(RetrieverConfig)


# ---- Search-R1's keys: what `do_search` asks for, and what follows from it

LOOP = "search_agent"
DEFAULT_LOOP = "single_turn_agent"


def check_search(config: PPOTrainerConfig) -> None:
    """With `do_search` the rows go to the search agent, and a response has room for all turns."""
    unused = _unused(config)
    if config.do_search is None:
        config.do_search = bool(config.retriever.url and unused)
    if not config.do_search:
        for key, value in unused.items():
            raise ConfigError(f"{key}={shown(value)} needs do_search=True")
        return
    _check_needs(config)
    data, rollout = config.data, config.actor_rollout_ref.rollout
    rollout.agent.default_agent_loop = LOOP
    if data.max_start_length is not None:
        if rollout.prompt_length == data.max_prompt_length:
            rollout.prompt_length = data.max_start_length
        data.max_prompt_length = data.max_start_length
    if rollout.response_length == data.max_response_length:
        turns, answers = config.max_turns, config.max_turns + 1
        rollout.response_length = answers * data.max_response_length + turns * data.max_obs_length


def _check_needs(config: PPOTrainerConfig) -> None:
    if not config.retriever.url:
        raise ConfigError(
            "do_search=True needs retriever.url: the address of a retrieval service, such as "
            "http://127.0.0.1:8000/retrieve"
        )
    if not config.actor_rollout_ref.actor.state_masking:
        raise ConfigError(
            "actor_rollout_ref.actor.state_masking=False: do_search=True takes true, since only "
            "tokens that the policy sampled are trained on"
        )
    loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
    if loop not in (LOOP, DEFAULT_LOOP):
        raise ConfigError(
            f"actor_rollout_ref.rollout.agent.default_agent_loop={loop!r}: do_search=True takes "
            f"{LOOP}"
        )


def _unused(config: PPOTrainerConfig) -> dict[str, int | bool]:
    """Keys that are set, and that nothing would read without `do_search`."""
    keys = {
        "data.max_start_length": config.data.max_start_length,
        "actor_rollout_ref.actor.state_masking": config.actor_rollout_ref.actor.state_masking,
    }
    return {key: value for key, value in keys.items() if value}
