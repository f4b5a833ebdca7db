"""verl's documented line of Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.verl_lines import PPO, START, bash, metrics, small

if TYPE_CHECKING:
    from tests.conftest import Lab

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.megatron


def test_ppo_from_the_file_of_megatron(lab: Lab, tmp_path: Path) -> None:
    roles = ("actor_rollout_ref.actor", "critic")
    done = bash(
        lab, tmp_path, f"{START} --config-name=ppo_megatron_trainer {PPO}", *small(lab),
        *(f"{role}.megatron.tensor_model_parallel_size=2" for role in roles),
        "trainer.n_gpus_per_node=2", "trainer.total_training_steps=1", "trainer.save_freq=1",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert metrics(done)["actor/grad_norm"] > 0 and "critic/vf_loss" in metrics(done)
    assert (tmp_path / "run/global_step_1/critic/dist_ckpt/.metadata").is_file()
