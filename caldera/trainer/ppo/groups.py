"""Worker groups for a run: objects of this process, or processes of this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from caldera.config import PPOTrainerConfig
from caldera.single_controller import (
    ClassWithInitArgs,
    LocalWorkerGroup,
    ResourcePool,
    WorkerGroup,
    create_colocated_worker_cls,
)
from caldera.trainer.ppo.ray_trainer import MakeGroups


def make_groups_for(config: PPOTrainerConfig) -> MakeGroups:
    """How this run's groups are made."""
    return partial(
        local_groups,
        device=str(config.trainer.device),
        timeout_s=config.actor_rollout_ref.nccl_timeout,
        log_dir=Path(config.trainer.default_local_dir).expanduser() / "logs",
    )


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
        pool, create_colocated_worker_cls(recipes), "_".join(recipes),
        device=device, timeout_s=timeout_s, log_dir=log_dir,
    )  # fmt: skip
    return whole.spawn(recipes)
