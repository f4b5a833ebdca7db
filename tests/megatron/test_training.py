"""Whole runs from the command line with strategy=megatron: the numbers of one plain process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Lab

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.megatron

Rows = list[dict[str, Any]]
ACTOR = "actor_rollout_ref.actor"
ROLES = (ACTOR, "critic", "reward_model")  # the reference follows the actor
STEPS = ("trainer.total_training_steps=3", "trainer.save_freq=3")


def ranks(number: int) -> str:
    return f"trainer.n_gpus_per_node={number}"


def laid_out(roles: tuple[str, ...] = ROLES, **sizes: int) -> tuple[str, ...]:
    """strategy=megatron for the roles, with sizes such as `tensor_model_parallel`."""
    strategies = (f"{role}.strategy=megatron" for role in roles)
    keys = (f"{role}.megatron.{name}_size={n}" for role in roles for name, n in sizes.items())
    # Numbers are compared after plain descent, which Megatron's distributed optimiser has not.
    plain = (f"{role}.megatron.use_distributed_optimizer=False" for role in roles)
    return (*strategies, *keys, *plain)


GRPO_LAYOUTS = {
    "alone": (ranks(1), *laid_out((ACTOR,))),
    "matrices shared by 2": (ranks(2), *laid_out((ACTOR,), tensor_model_parallel=2)),
}


@pytest.fixture(scope="module")
def grpo(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """A run of one process without Megatron."""
    return lab.train(tmp_path_factory.mktemp("grpo"), *lab.descent, *STEPS, ranks(1))


@pytest.mark.parametrize("name", GRPO_LAYOUTS)
def test_grpo(lab: Lab, tmp_path: Path, grpo: Rows, name: str) -> None:
    """Sampling, log-probs and updates, then a checkpoint."""
    rows = lab.train(tmp_path, *lab.descent, *STEPS, *GRPO_LAYOUTS[name])
    lab.assert_same(rows, grpo)
    assert (tmp_path / "global_step_3/actor/dist_ckpt/.metadata").is_file()


def test_ppo_with_all_roles(lab: Lab, tmp_path: Path, all_roles: tuple[str, ...]) -> None:
    """Critic, reference and reward model lie as the actor does, on four ranks."""
    expected = lab.train(tmp_path / "alone", *all_roles, *STEPS, ranks(1))
    layout = laid_out(tensor_model_parallel=2, pipeline_model_parallel=2)
    rows = lab.train(tmp_path / "four", *all_roles, *STEPS, ranks(4), *layout)
    lab.assert_same(rows, expected)
    assert (tmp_path / "four/global_step_3/critic/dist_ckpt/.metadata").is_file()


def test_a_run_goes_on_with_other_strategies_and_layouts(lab: Lab, tmp_path: Path) -> None:
    """Matrices shared, then fsdp2, then layers shared: as if one process had done it all."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = lab.train(whole, *lab.descent, "trainer.total_training_steps=3")
    ways = (
        laid_out((ACTOR,), tensor_model_parallel=2),
        (f"{ACTOR}.strategy=fsdp2",),
        laid_out((ACTOR,), pipeline_model_parallel=2),
    )
    rows: Rows = []
    for step, way in enumerate(ways, 1):
        saving = (f"trainer.total_training_steps={step}", "trainer.save_freq=1")
        rows = lab.train(parts, *lab.descent, *saving, ranks(2), *way)
    lab.assert_same(rows, expected)
