"""verl's documented line of PPO on Ray's workers, with a loss that was written for verl."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.verl_lines import PPO, START, bash, small

if TYPE_CHECKING:
    from tests.conftest import Lab

pytestmark = pytest.mark.ray
LOSS = """
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss


@register_policy_loss("mine")
def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
         rollout_is_weights=None):
    return agg_loss(-log_prob * advantages, response_mask, loss_agg_mode), {"actor/mine": 7.0}
"""


def test_ppo(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "loss_of_mine.py").write_text(LOSS)
    bash(
        lab, tmp_path, f"{START} {PPO}", *small(lab),
        "actor_rollout_ref.model.external_lib=loss_of_mine",
        "actor_rollout_ref.actor.policy_loss.loss_mode=mine",
        "trainer.worker_group=ray", "trainer.total_training_steps=1",
        "+ray_kwargs.ray_init={address: local, num_cpus: 3, include_dashboard: false}",
        "trainer.logger=[console,file]", f"trainer.default_local_dir={tmp_path / 'run'}",
    )  # fmt: skip
    (row,) = lab.metrics(tmp_path / "run")
    assert row["actor/mine"] == 7.0 and "critic/vf_loss" in row
