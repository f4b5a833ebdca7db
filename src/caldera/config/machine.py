"""Defaults that depend on the machine."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from caldera.config.batches import check_devices, choose_token_budgets
from caldera.config.megatron import MegatronConfig
from caldera.config.optim import FSDPConfig
from caldera.config.ppo import PPOTrainerConfig
from caldera.config.samplers import DEFAULT_SAMPLER
from caldera.config.strategies import roles
from caldera.errors import ConfigError

if TYPE_CHECKING:
    from caldera.config.offline import GenerationConfig
    from caldera.config.sft import SFTTrainerConfig

logger = logging.getLogger(__name__)


def resolve_for_machine(config: PPOTrainerConfig, gpus: int) -> list[str]:
    """Fill in what depends on the machine; returns what was chosen, for a person to read.

    `gpus` are those of this machine, or of a node of the cluster.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    chosen: list[str] = []
    device, _ = choose_devices(config, gpus, chosen)
    _check_gpus(config, gpus)
    if trainer.worker_group == "local":
        warn_of_cores(device, _ranks(config))
    check_devices(config)
    chosen += choose_token_budgets(config, device)
    if rollout.name is None:
        rollout.name = DEFAULT_SAMPLER
        chosen.append(f"actor_rollout_ref.rollout.name={rollout.name}")
    for key, memory in memories(config).items():
        if memory.dtype is None:
            memory.dtype = default_dtype(device, memory)
            chosen.append(f"{key}.dtype={memory.dtype}")
    if rollout.dtype is None:
        rollout.dtype = default_dtype(device, _of_actor(config))
        chosen.append(f"actor_rollout_ref.rollout.dtype={rollout.dtype}")
    return chosen


def log_chosen(chosen: list[str]) -> None:
    """Log what was filled in, if anything."""
    if chosen:
        logger.info("chosen for this machine: %s", ", ".join(chosen))


def choose_devices(
    config: PPOTrainerConfig | SFTTrainerConfig | GenerationConfig, gpus: int, chosen: list[str]
) -> tuple[str, int]:
    """Fill in where the workers are, and add it to what was chosen; returns the device and how many
    of them a node has."""
    trainer = config.trainer
    if trainer.worker_group is None:
        trainer.worker_group = "ray" if uses_ray(config) else "local"
        chosen.append(f"trainer.worker_group={trainer.worker_group}")
    if trainer.device is None:
        trainer.device = "cuda" if gpus else "cpu"
        chosen.append(f"trainer.device={trainer.device}")
    elif trainer.device == "cuda" and not gpus:
        where = "the Ray cluster" if trainer.worker_group == "ray" else "this machine"
        raise ConfigError(f"trainer.device='cuda': {where} has no usable GPU; takes cpu")
    if trainer.n_gpus_per_node is None:
        trainer.n_gpus_per_node = gpus if trainer.device == "cuda" else 1
        chosen.append(f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}")
    return trainer.device, trainer.n_gpus_per_node


def check_gpus_here(config: SFTTrainerConfig | GenerationConfig, gpus: int) -> None:
    """This machine has the GPUs that are asked for; Ray counts those of its cluster."""
    trainer = config.trainer
    counts_here = trainer.worker_group != "ray" and trainer.device == "cuda"
    if counts_here and (trainer.n_gpus_per_node or 1) > gpus:
        raise ConfigError(
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: this machine has {gpus} GPUs"
        )


def uses_ray(config: PPOTrainerConfig | SFTTrainerConfig | GenerationConfig) -> bool:
    """Whether workers are Ray's: for several nodes, where a cluster is named, or as asked for."""
    trainer = config.trainer
    if trainer.worker_group is not None:
        return trainer.worker_group == "ray"
    return trainer.nnodes > 1 or bool(os.environ.get("RAY_ADDRESS"))


def memories(config: PPOTrainerConfig) -> dict[str, FSDPConfig | MegatronConfig]:
    """What says the precision of each role's model, by key."""
    found: dict[str, FSDPConfig | MegatronConfig] = {}
    for role in roles(config).values():
        if role.is_megatron:
            found[f"{role.name}.megatron"] = role.megatron
        elif role.name == "critic":
            found["critic.model.fsdp_config"] = config.critic.model.fsdp_config
        elif role.name != "reward_model":
            found[f"{role.name}.fsdp_config"] = role.node.fsdp_config
    return found


def _of_actor(config: PPOTrainerConfig) -> FSDPConfig | MegatronConfig:
    return next(iter(memories(config).values()))


def _check_gpus(config: PPOTrainerConfig, gpus: int) -> None:
    """Local GPUs are counted here; Ray counts those of its cluster."""
    trainer, wanted = config.trainer, _ranks(config)
    if trainer.worker_group == "local" and trainer.device == "cuda" and wanted > gpus:
        raise ConfigError(
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: the run asks for {wanted} GPUs, "
            f"this machine has {gpus}"
        )


def _ranks(config: PPOTrainerConfig) -> int:
    """Processes a node, each with a device of its own."""
    ranks = config.trainer.n_gpus_per_node or 1
    if config.reward_model.has_worker and config.reward_model.enable_resource_pool:
        ranks += config.reward_model.n_gpus_per_node
    return ranks


def warn_of_cores(device: str, ranks: int) -> None:
    """Log a warning if the ranks of this machine would take turns on its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if device == "cpu" and cores is not None and ranks > cores:
        logger.warning(
            "trainer.n_gpus_per_node: %d processes share %d CPU cores, which is slower than one "
            "process a core; takes up to %d here",
            ranks,
            cores,
            cores,
        )


def default_dtype(device: str, memory: FSDPConfig | MegatronConfig) -> str:
    """bfloat16 where it is fast, and where the parameters are; otherwise float32."""
    kept = memory.dtype if isinstance(memory, MegatronConfig) else memory.model_dtype
    return "bfloat16" if device == "cuda" or kept in ("bf16", "bfloat16") else "float32"
