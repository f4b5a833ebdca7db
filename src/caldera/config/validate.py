"""Checks that need more than one key."""

from __future__ import annotations

import dataclasses
import logging
import re

from caldera.config.actor import ActorConfig
from caldera.config.batches import check_batches
from caldera.config.critic import CriticConfig
from caldera.config.estimators import check_estimator
from caldera.config.fields import as_list, check_console_metrics, shown
from caldera.config.machine import memories
from caldera.config.model import ModelConfig
from caldera.config.optim import CONTENTS, CheckpointConfig, FSDPConfig
from caldera.config.ppo import PPOTrainerConfig, check_search
from caldera.config.profiling import ProfilerConfig, check_profilers
from caldera.config.reward import check_path_given, check_reward_model
from caldera.config.rollout import ValKwargs, check_rollout
from caldera.config.rollout_correction import (
    RolloutCorrectionConfig,
    check_rollout_correction,
    rollout_correction_preset,
)
from caldera.config.samplers import NEUTRAL
from caldera.config.strategies import check_strategies
from caldera.config.trainer import RunKeys
from caldera.errors import ConfigError, UnsupportedError

logger = logging.getLogger(__name__)

CORRECTION = "algorithm.rollout_correction"


def check_consistency(config: PPOTrainerConfig) -> None:
    """Keys fit together; lists that may be written as one string become lists."""
    _check_required(config)
    config.data.train_files = as_list("data.train_files", config.data.train_files)
    config.data.val_files = as_list("data.val_files", config.data.val_files or [])
    config.trainer.logger = as_list("trainer.logger", config.trainer.logger)
    config.trainer.console_metrics = check_console_metrics(config.trainer.console_metrics)
    if config.data.seed is None:
        config.data.seed = config.actor_rollout_ref.rollout.seed
    _check_world(config)
    check_reward_model(config.reward_model)
    _check_checkpoints(config)
    _check_precision(config)
    _check_lists(config)
    _check_followers(config)
    check_strategies(config)
    check_batches(config)
    _check_sampling(config)
    _check_correction(config)  # before the algorithm's: it applies the preset
    _check_algorithm(config)
    _check_data(config)
    check_profilers(config.global_profiler, profilers_of(config))
    check_search(config)
    _warn_of_doubtful_values(config)


def profilers_of(config: PPOTrainerConfig) -> dict[str, ProfilerConfig]:
    """What each role records, by its key."""
    parts = config.actor_rollout_ref
    return {
        "actor_rollout_ref.actor.profiler": parts.actor.profiler,
        "actor_rollout_ref.ref.profiler": parts.ref.profiler,
        "actor_rollout_ref.rollout.profiler": parts.rollout.profiler,
        "critic.profiler": config.critic.profiler,
        "reward_model.profiler": config.reward_model.profiler,
    }


def _check_required(config: PPOTrainerConfig) -> None:
    required = {
        "actor_rollout_ref.model.path": config.actor_rollout_ref.model.path,
        "data.train_files": config.data.train_files,
    }
    for key, value in required.items():
        if not value:
            raise ConfigError(f"{key} is required: give {key}=...")
    _check_validates(config)
    check_resume(config.trainer.resume_mode, config.trainer.resume_from_path)
    check_path_given(config.custom_reward_function, "custom_reward_function")
    check_path_given(config.reward_manager.module, "reward_manager.module")


def _check_validates(config: PPOTrainerConfig) -> None:
    """Without files to validate on, nothing asks for a validation."""
    trainer = config.trainer
    if config.data.val_files:
        return
    if trainer.val_only:
        raise ConfigError("trainer.val_only=True needs data.val_files=...")
    if trainer.test_freq > 0:
        raise ConfigError(
            f"trainer.test_freq={trainer.test_freq} needs data.val_files=...; -1 does without"
        )
    trainer.val_before_train = False


def check_resume(mode: str, path: str | None) -> None:
    """A run resumes from a path if it is told to."""
    if mode == "resume_path" and not path:
        raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path=...")
    if mode != "resume_path" and path not in (None, "", "False", "True"):  # a flag in early verl
        logger.warning(
            "trainer.resume_from_path=%s is not read with trainer.resume_mode=%s; "
            "trainer.resume_mode=resume_path starts from it",
            path,
            mode,
        )


def _check_checkpoints(config: PPOTrainerConfig) -> None:
    for key, checkpoint in {
        "actor_rollout_ref.actor.checkpoint": config.actor_rollout_ref.actor.checkpoint,
        "critic.checkpoint": config.critic.checkpoint,
    }.items():
        check_layout(key, checkpoint)
    parts = config.actor_rollout_ref
    check_push(config.trainer, config.trainer.save_freq, parts.actor.checkpoint, parts.model)


REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_push(
    trainer: RunKeys, save_freq: int | str, checkpoint: CheckpointConfig, model: ModelConfig
) -> None:
    """Checkpoints that are pushed are saved, and hold a Hugging Face folder or an adapter."""
    repository = trainer.push_to_hub
    if repository is None:
        return
    if not REPOSITORY.fullmatch(repository):
        raise ConfigError(
            f"trainer.push_to_hub={repository!r}: takes the name of a repository, as name or "
            "owner/name"
        )
    if save_freq == -1:
        raise ConfigError(
            f"trainer.push_to_hub={repository!r} pushes checkpoints, and trainer.save_freq=-1 "
            "saves none: takes a number of steps (the last one is always saved)"
        )
    if "hf_model" not in checkpoint.save_contents and not model.has_adapter:
        checkpoint.save_contents = [*checkpoint.save_contents, "hf_model"]


def check_layout(group: str, checkpoint: CheckpointConfig) -> None:
    if checkpoint.async_save and checkpoint.layout == "classic":
        raise ConfigError(f"{group}.async_save=True: {group}.layout=classic takes false; dist can")


def _check_world(config: PPOTrainerConfig) -> None:
    trainer = config.trainer
    if trainer.nnodes > 1 and trainer.worker_group == "local":
        raise ConfigError(
            f"trainer.worker_group='local': trainer.nnodes={trainer.nnodes} nodes need 'ray'"
        )
    rollout = config.actor_rollout_ref.rollout
    check_rollout(rollout, rollout.traits)


def _check_precision(config: PPOTrainerConfig) -> None:
    for key, memory in memories(config).items():
        if isinstance(memory, FSDPConfig):
            check_dtypes(key, memory)


def check_dtypes(group: str, memory: FSDPConfig) -> None:
    if memory.model_dtype == "bf16" and memory.dtype == "float32":
        raise UnsupportedError(
            f"{group}.dtype='float32' with {group}.model_dtype='bf16': parameters that are kept "
            "in bfloat16 compute in bfloat16"
        )


def _check_lists(config: PPOTrainerConfig) -> None:
    roles: dict[str, ActorConfig | CriticConfig] = {
        "actor_rollout_ref.actor": config.actor_rollout_ref.actor,
        "critic": config.critic,
    }
    for name, role in roles.items():
        check_contents(f"{name}.checkpoint", role.checkpoint)
        check_betas(f"{name}.optim", role.optim.betas)


def check_contents(group: str, checkpoint: CheckpointConfig) -> None:
    """What is written and read back has known names."""
    for key in ("save_contents", "load_contents"):
        unknown = [item for item in getattr(checkpoint, key) if item not in CONTENTS]
        if unknown:
            raise ConfigError(
                f"{group}.{key}={getattr(checkpoint, key)}: {', '.join(unknown)} is "
                f"not one of {', '.join(CONTENTS)}"
            )


def check_betas(group: str, betas: list[float]) -> None:
    if len(betas) != 2:
        raise ConfigError(f"{group}.betas={betas}: takes two numbers")


def _check_followers(config: PPOTrainerConfig) -> None:
    """Keys that repeat another one say the same."""
    parts = config.actor_rollout_ref
    n = parts.rollout.n
    copies = {
        "actor_rollout_ref.actor.rollout_n": parts.actor.rollout_n,
        "actor_rollout_ref.ref.rollout_n": parts.ref.rollout_n,
        "critic.rollout_n": config.critic.rollout_n,
    }
    for key, value in copies.items():
        if value != n:
            raise ConfigError(
                f"{key}={value} and actor_rollout_ref.rollout.n={n} are both responses per prompt: "
                "set the second alone"
            )


def _check_sampling(config: PPOTrainerConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature <= 0:
        raise ConfigError(
            "actor_rollout_ref.rollout.val_kwargs.do_sample=True needs actor_rollout_ref.rollout."
            f"val_kwargs.temperature > 0, got {rollout.val_kwargs.temperature}"
        )
    if rollout.do_sample and rollout.temperature <= 0:
        raise ConfigError(
            f"actor_rollout_ref.rollout.temperature={rollout.temperature}: sampling needs "
            "a temperature above 0 (actor_rollout_ref.rollout.do_sample=False is greedy)"
        )


def _check_algorithm(config: PPOTrainerConfig) -> None:
    check_estimator(config)
    groups = config.algorithm.filter_groups
    if groups.enable and not groups.metric:
        raise ConfigError(
            "algorithm.filter_groups.enable=True needs algorithm.filter_groups.metric: acc, "
            "score, seq_reward, seq_final_reward, or another value of the scorer's"
        )
    if groups.enable and config.actor_rollout_ref.rollout.n < 2:
        raise ConfigError(
            "algorithm.filter_groups.enable=True compares the responses to a prompt: it needs "
            f"actor_rollout_ref.rollout.n of at least 2, got {config.actor_rollout_ref.rollout.n}"
        )
    if config.data.gen_batch_size is not None and not groups.enable:
        raise ConfigError(
            f"data.gen_batch_size={config.data.gen_batch_size} prompts: without "
            "algorithm.filter_groups.enable=True every step samples data.train_batch_size prompts"
        )


def _check_correction(config: PPOTrainerConfig) -> None:
    """Apply the preset, check the values, and give the policy loss the same ones."""
    correction = config.algorithm.rollout_correction
    copied = config.actor_rollout_ref.actor.policy_loss.rollout_correction
    if copied not in (correction, RolloutCorrectionConfig()):
        raise ConfigError(
            "actor_rollout_ref.actor.policy_loss.rollout_correction has the values of "
            f"{CORRECTION}: set them there alone"
        )
    if correction.preset is not None:
        _apply_preset(correction)
    check_rollout_correction(correction)
    config.actor_rollout_ref.actor.policy_loss.rollout_correction = correction
    corrects = correction.bypass_mode or correction.rollout_is or correction.rollout_rs
    if corrects and not config.actor_rollout_ref.rollout.calculate_log_probs:
        raise ConfigError(
            f"{CORRECTION} compares with the sampler's log-probs: it needs "
            "actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if correction.bypass_mode and loss_mode not in ("vanilla", "bypass_mode"):
        raise ConfigError(
            f"{CORRECTION}.bypass_mode=True brings its own policy loss: leave "
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode!r} out"
        )
    if correction.bypass_mode:
        config.actor_rollout_ref.actor.policy_loss.loss_mode = "bypass_mode"
    elif loss_mode == "bypass_mode":
        raise ConfigError(
            "actor_rollout_ref.actor.policy_loss.loss_mode='bypass_mode' needs "
            f"{CORRECTION}.bypass_mode=True"
        )


def _apply_preset(correction: RolloutCorrectionConfig) -> None:
    """The preset's values, except where a key was set to something else than its default."""
    preset = rollout_correction_preset(str(correction.preset))
    for field in dataclasses.fields(correction):
        if field.name != "preset" and getattr(correction, field.name) == field.default:
            setattr(correction, field.name, getattr(preset, field.name))


def _check_data(config: PPOTrainerConfig) -> None:
    sampler, data = config.data.sampler, config.data
    if (sampler.class_path is None) != (sampler.class_name is None):
        raise ConfigError(
            f"data.sampler.class_path={shown(sampler.class_path)} and "
            f"data.sampler.class_name={shown(sampler.class_name)} go together: give both"
        )
    if sampler.class_path is not None and data.dataloader_num_workers > 0:
        raise ConfigError(
            f"data.dataloader_num_workers={data.dataloader_num_workers}: a custom sampler "
            "(data.sampler.class_path) needs 0, so that it sees each batch before the next"
        )


def _warn_of_greedy_validation(validation: ValKwargs) -> None:
    key = "actor_rollout_ref.rollout.val_kwargs"
    greedy = ValKwargs()
    for name in ("n", "temperature", "top_k", "top_p", "min_p"):
        value = getattr(validation, name)
        if not validation.do_sample and value not in (
            getattr(greedy, name),
            *NEUTRAL.get(name, ()),
        ):
            logger.warning(
                "%s.%s=%s has no effect on a greedy validation; %s.do_sample=True samples",
                key,
                name,
                value,
                key,
            )


def _warn_of_doubtful_values(config: PPOTrainerConfig) -> None:
    _warn_of_greedy_validation(config.actor_rollout_ref.rollout.val_kwargs)
    actor = config.actor_rollout_ref.actor
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    if (low is not None and low >= 0.5) or (high is not None and high >= 1):
        logger.warning(
            "actor_rollout_ref.actor.clip_ratio_low=%s, clip_ratio_high=%s are distances from 1, "
            "not bounds of the ratio: usual values are 0.2 and 0.28",
            low,
            high,
        )
    if config.algorithm.use_kl_in_reward and actor.use_kl_loss:
        logger.warning(
            "algorithm.use_kl_in_reward and actor_rollout_ref.actor.use_kl_loss are both on: "
            "the distance to the reference counts twice"
        )
