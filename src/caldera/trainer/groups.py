"""Worker groups for a run: objects of this process, or processes of this machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from caldera.config import PPOTrainerConfig, SFTTrainerConfig, uses_ray
from caldera.config.offline import GenerationConfig
from caldera.single_controller import (
    ClassWithInitArgs,
    LocalWorkerGroup,
    ResourcePool,
    WorkerGroup,
    create_colocated_worker_cls,
)
from caldera.trainer.running import stop_told

C = TypeVar("C", PPOTrainerConfig, SFTTrainerConfig)
MakeGroups = Callable[[ResourcePool, dict[str, ClassWithInitArgs]], dict[str, WorkerGroup]]
"""(a pool, the roles that share it) -> a group for each role."""


SECONDS_OF_SAMPLING = 86_400.0
"""How long one rank may sample after another is done. Ranks never wait for each other."""


def timeout_of(config: PPOTrainerConfig | SFTTrainerConfig | GenerationConfig) -> float:
    """How long a collective of the run's ranks may take, in seconds."""
    if isinstance(config, PPOTrainerConfig):
        return config.actor_rollout_ref.nccl_timeout
    if isinstance(config, GenerationConfig):
        return SECONDS_OF_SAMPLING
    return config.trainer.nccl_timeout


def make_groups_for(config: PPOTrainerConfig | SFTTrainerConfig) -> MakeGroups:
    """How this run's groups are made."""
    return partial(
        local_groups,
        device=str(config.trainer.device),
        timeout_s=timeout_of(config),
        log_dir=Path(config.trainer.default_local_dir).expanduser() / "logs",
    )


def run_where_asked(
    config: C,
    settle: Callable[[C, int], None],
    check_installed: Callable[[C], None],
    work: Callable[[C, MakeGroups], None],
) -> None:
    """Train on this machine, or on a Ray cluster."""
    if uses_ray(config):
        from caldera.trainer.ray_runner import run_on_ray

        with stop_told(config):
            run_on_ray(config, settle, work)
    else:
        settle(config, torch.cuda.device_count())
        check_installed(config)
        work(config, make_groups_for(config))


def local_groups(
    pool: ResourcePool,
    recipes: dict[str, ClassWithInitArgs],
    *,
    device: str,
    timeout_s: float,
    log_dir: Path,
) -> dict[str, WorkerGroup]:
    """A group for each role. With one rank they are objects of this process, one by one; with more,
    every process holds all roles of the pool."""
    if pool.world_size == 1:
        return {role: LocalWorkerGroup(pool, recipe, role) for role, recipe in recipes.items()}
    whole = LocalWorkerGroup(
        pool,
        create_colocated_worker_cls(recipes),
        "_".join(recipes),
        device=device,
        timeout_s=timeout_s,
        log_dir=log_dir,
    )
    return whole.spawn(recipes)
