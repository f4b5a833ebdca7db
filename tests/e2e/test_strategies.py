"""Whole runs whose models are sharded: the numbers of a run do not depend on the strategy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from caldera.engine.checkpoints import read_whole

if TYPE_CHECKING:
    from tests.conftest import Lab

STEPS = ("trainer.total_training_steps=3", "trainer.save_freq=3")
ACTOR = "actor_rollout_ref.actor"
PPO = ("algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=True", "trainer.critic_warmup=0")
COMPARED = (
    "actor/pg_loss", "actor/entropy", "actor/kl_loss", "critic/vf_loss", "critic/score/mean",
    "critic/rewards/mean", "response_length/mean",
)  # fmt: skip
STRATEGIES = {
    "fsdp on 2": ("trainer.n_gpus_per_node=2", f"{ACTOR}.strategy=fsdp", "critic.strategy=fsdp"),
    "fsdp2, tokens shared by 2": (
        "trainer.n_gpus_per_node=2",
        f"{ACTOR}.strategy=fsdp2",
        "critic.strategy=fsdp2",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        "critic.ulysses_sequence_parallel_size=2",
    ),
    "fsdp2, matrices shared by 2": (
        "trainer.n_gpus_per_node=2",
        f"{ACTOR}.strategy=fsdp2",
        "critic.strategy=fsdp2",
        f"{ACTOR}.fsdp_config.tensor_parallel_size=2",
        "actor_rollout_ref.ref.fsdp_config.tensor_parallel_size=2",
        "critic.model.fsdp_config.tensor_parallel_size=2",
    ),
}


def assert_same(ours: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    assert len(ours) == len(reference) == 3
    for one, other in zip(ours, reference, strict=True):
        for key in (key for key in COMPARED if key in other):
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5), key


@pytest.fixture(scope="module")
def alone(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    return lab.train(folder, *PPO, *STEPS, *lab.descent, "trainer.n_gpus_per_node=1")


@pytest.mark.parametrize("name", STRATEGIES)
def test_ppo_on_shards(lab: Lab, tmp_path: Path, alone: list[dict[str, Any]], name: str) -> None:
    """Sampling, log-probs, reference, critic and updates, then a checkpoint."""
    sharded = lab.train(tmp_path, *PPO, *STEPS, *lab.descent, *STRATEGIES[name])
    assert_same(sharded, alone)
    assert (tmp_path / "global_step_3/critic/dist_ckpt/.metadata").is_file()


def test_a_run_goes_on_with_another_strategy(lab: Lab, tmp_path: Path) -> None:
    """fsdp2 with asynchronous checkpoints, then one process: as if one process had done it all."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    saving = ("trainer.save_freq=2", f"{ACTOR}.checkpoint.async_save=True", *lab.descent)
    expected = lab.train(whole, "trainer.total_training_steps=4", *lab.descent)
    lab.train(
        parts, *saving, "trainer.total_training_steps=2", "trainer.n_gpus_per_node=2",
        f"{ACTOR}.strategy=fsdp2",
    )  # fmt: skip
    rows = lab.train(parts, *saving, "trainer.total_training_steps=4")
    assert len(rows) == 4
    for one, other in zip(rows, expected, strict=True):
        for key in (key for key in COMPARED if key in other):
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5), key
    assert all(
        torch.isfinite(tensor).all() for _, tensor in read_whole(parts / "global_step_4/actor")
    )
