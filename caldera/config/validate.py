"""Checks that need more than one key, and defaults that depend on the machine."""

from __future__ import annotations

import logging

from caldera.config.actor import ActorConfig
from caldera.config.critic import CriticConfig
from caldera.config.model import CONTENTS, FSDPConfig
from caldera.config.ppo import PPOTrainerConfig
from caldera.errors import ConfigError, UnsupportedError

logger = logging.getLogger(__name__)

OTHER_SAMPLERS = ("vllm", "sglang", "trtllm")


def check_consistency(config: PPOTrainerConfig) -> None:
    """Keys fit together; lists that may be written as one string become lists."""
    _check_required(config)
    config.data.train_files = _as_list(config.data.train_files)
    config.data.val_files = _as_list(config.data.val_files)
    config.trainer.logger = _as_list(config.trainer.logger)
    if config.data.seed is None:
        config.data.seed = config.actor_rollout_ref.rollout.seed
    _check_world(config)
    _check_precision(config)
    _check_lists(config)
    _check_batches(config)
    _check_micro_batches(config)
    _check_sampling(config)
    _warn_of_clip_bounds(config)


def needs_critic(config: PPOTrainerConfig) -> bool:
    """A critic is trained."""
    if config.critic.enable is not None:
        return config.critic.enable
    return config.algorithm.adv_estimator == "gae"


def needs_reference(config: PPOTrainerConfig) -> bool:
    """Log-probs of the reference are needed."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def resolve_for_machine(config: PPOTrainerConfig, gpus: int) -> list[str]:
    """Fill in what depends on the machine; returns what was chosen, for a person to read."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    chosen = []
    if trainer.device is None:
        trainer.device = "cuda" if gpus else "cpu"
        chosen.append(f"trainer.device={trainer.device}")
    elif trainer.device == "cuda" and not gpus:
        raise ConfigError("trainer.device='cuda': this machine has no usable GPU; takes cpu")
    if trainer.n_gpus_per_node is None:
        trainer.n_gpus_per_node = 1
        chosen.append("trainer.n_gpus_per_node=1")
    if rollout.name is None:
        rollout.name = "native"
        chosen.append("actor_rollout_ref.rollout.name=native")
    for key, memory in _memories(config).items():
        if memory.dtype is None:
            memory.dtype = _default_dtype(trainer.device, memory)
            chosen.append(f"{key}.dtype={memory.dtype}")
    if rollout.dtype is None:
        rollout.dtype = _default_dtype(trainer.device, config.actor_rollout_ref.actor.fsdp_config)
        chosen.append(f"actor_rollout_ref.rollout.dtype={rollout.dtype}")
    return chosen


def _memories(config: PPOTrainerConfig) -> dict[str, FSDPConfig]:
    return {
        "actor_rollout_ref.actor.fsdp_config": config.actor_rollout_ref.actor.fsdp_config,
        "actor_rollout_ref.ref.fsdp_config": config.actor_rollout_ref.ref.fsdp_config,
        "critic.model.fsdp_config": config.critic.model.fsdp_config,
    }


def _default_dtype(device: str, memory: FSDPConfig) -> str:
    """bfloat16 where it is fast, and where the parameters are; otherwise float32."""
    return "bfloat16" if device == "cuda" or memory.model_dtype == "bf16" else "float32"


def _as_list(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _check_required(config: PPOTrainerConfig) -> None:
    required = {
        "actor_rollout_ref.model.path": config.actor_rollout_ref.model.path,
        "data.train_files": config.data.train_files,
        "data.val_files": config.data.val_files,
    }
    for key, value in required.items():
        if not value:
            raise ConfigError(f"{key} is required: give {key}=...")
    if config.algorithm.adv_estimator == "gae" and config.critic.enable is False:
        raise ConfigError("critic.enable=False: algorithm.adv_estimator=gae needs the critic")
    if config.trainer.resume_mode == "resume_path" and not config.trainer.resume_from_path:
        raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path=...")


def _check_world(config: PPOTrainerConfig) -> None:
    devices = config.trainer.n_gpus_per_node
    if devices is not None and devices > 1:
        raise UnsupportedError(
            f"trainer.n_gpus_per_node={devices}: this release trains in one process; takes 1"
        )
    strategies = {
        "actor_rollout_ref.actor.strategy": config.actor_rollout_ref.actor.strategy,
        "actor_rollout_ref.ref.strategy": config.actor_rollout_ref.ref.strategy,
        "critic.strategy": config.critic.strategy,
    }
    for key, strategy in strategies.items():
        if strategy == "megatron":
            raise UnsupportedError(
                f"{key}='megatron' is not part of this release; takes local, fsdp, fsdp2"
            )
    sampler = config.actor_rollout_ref.rollout.name
    if sampler in OTHER_SAMPLERS:
        raise UnsupportedError(
            f"actor_rollout_ref.rollout.name={sampler!r} is not part of this release; "
            "takes native, hf"
        )
    for key, extra in {
        "actor_rollout_ref.rollout.engine_kwargs": config.actor_rollout_ref.rollout.engine_kwargs,
        "ray_kwargs": config.ray_kwargs,
    }.items():
        if extra:
            raise UnsupportedError(f"{key}={extra!r}: nothing in this release takes it")


def _check_precision(config: PPOTrainerConfig) -> None:
    for key, memory in _memories(config).items():
        if memory.model_dtype == "bf16" and memory.dtype == "float32":
            raise UnsupportedError(
                f"{key}.dtype='float32' with {key}.model_dtype='bf16': parameters that are kept "
                "in bfloat16 compute in bfloat16"
            )


def _check_lists(config: PPOTrainerConfig) -> None:
    roles: dict[str, ActorConfig | CriticConfig] = {
        "actor_rollout_ref.actor": config.actor_rollout_ref.actor,
        "critic": config.critic,
    }
    for name, role in roles.items():
        checkpoint = role.checkpoint
        for key in ("save_contents", "load_contents"):
            unknown = [item for item in getattr(checkpoint, key) if item not in CONTENTS]
            if unknown:
                raise ConfigError(
                    f"{name}.checkpoint.{key}: {', '.join(unknown)} is not one of "
                    f"{', '.join(CONTENTS)}"
                )
        if len(role.optim.betas) != 2:
            raise ConfigError(f"{name}.optim.betas={role.optim.betas}: takes two numbers")


def _check_batches(config: PPOTrainerConfig) -> None:
    prompts = config.data.train_batch_size
    minis = {"actor_rollout_ref.actor": config.actor_rollout_ref.actor.ppo_mini_batch_size}
    if needs_critic(config):
        minis["critic"] = config.critic.ppo_mini_batch_size
    for name, mini in minis.items():
        if mini > prompts or prompts % mini:
            raise ConfigError(
                f"data.train_batch_size={prompts} prompts cannot be cut into mini-batches of "
                f"{name}.ppo_mini_batch_size={mini} prompts: the first must be a multiple of the "
                f"second ({prompts} = {prompts // mini} x {mini} + {prompts % mini})"
            )


def _check_micro_batches(config: PPOTrainerConfig) -> None:
    actor, rollout, ref = (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
        config.actor_rollout_ref.ref,
    )
    needed = [
        ("actor_rollout_ref.actor", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz",
         actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz),
        ("actor_rollout_ref.rollout", "log_prob_micro_batch_size_per_gpu",
         "log_prob_use_dynamic_bsz",
         rollout.log_prob_micro_batch_size_per_gpu, rollout.log_prob_use_dynamic_bsz),
    ]  # fmt: skip
    if needs_reference(config):
        needed.append(
            ("actor_rollout_ref.ref", "log_prob_micro_batch_size_per_gpu",
             "log_prob_use_dynamic_bsz",
             ref.log_prob_micro_batch_size_per_gpu, ref.log_prob_use_dynamic_bsz)
        )  # fmt: skip
    if needs_critic(config):
        critic = config.critic
        needed.append(
            ("critic", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz",
             critic.ppo_micro_batch_size_per_gpu, critic.use_dynamic_bsz)
        )  # fmt: skip
    for group, size_key, dynamic_key, size, dynamic in needed:
        if size is None and not dynamic:
            raise ConfigError(
                f"{group}.{size_key}=null: give it a number of samples, "
                f"or form micro-batches by tokens with {group}.{dynamic_key}=True"
            )


def _check_sampling(config: PPOTrainerConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature <= 0:
        raise ConfigError(
            "actor_rollout_ref.rollout.val_kwargs.do_sample=True needs "
            f"val_kwargs.temperature > 0, got {rollout.val_kwargs.temperature}"
        )
    if rollout.do_sample and rollout.temperature <= 0:
        raise ConfigError(
            f"actor_rollout_ref.rollout.temperature={rollout.temperature}: sampling needs "
            "a temperature above 0 (actor_rollout_ref.rollout.do_sample=False is greedy)"
        )


def _warn_of_clip_bounds(config: PPOTrainerConfig) -> None:
    actor = config.actor_rollout_ref.actor
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    if (low is not None and low >= 0.5) or (high is not None and high >= 1):
        logger.warning(
            "actor_rollout_ref.actor.clip_ratio_low=%s, clip_ratio_high=%s are distances from 1, "
            "not bounds of the ratio: usual values are 0.2 and 0.28",
            low,
            high,
        )
