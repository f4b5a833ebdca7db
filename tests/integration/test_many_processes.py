"""One control flow over any number of processes: the numbers of a run do not depend on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Lab

STEPS = "trainer.total_training_steps=3"


def test_grpo_on_two_processes(lab: Lab, tmp_path: Path) -> None:
    steps = (STEPS, *lab.descent)
    alone = lab.train(tmp_path / "one", *steps, "trainer.n_gpus_per_node=1")
    both = lab.train(
        tmp_path / "two", *steps, "trainer.n_gpus_per_node=2", "trainer.test_freq=3",
        "trainer.save_freq=3",
    )  # fmt: skip
    lab.assert_same(both, alone)
    assert "global_seqlen/balanced_max" in both[0]
    assert (tmp_path / "two/global_step_3/actor").is_dir()
    assert sorted(path.name for path in (tmp_path / "two/logs").iterdir())


def test_ppo_with_all_roles_on_two_processes(
    lab: Lab, tmp_path: Path, all_roles: tuple[str, ...]
) -> None:
    roles = (*all_roles, STEPS)
    alone = lab.train(tmp_path / "one", *roles, "trainer.n_gpus_per_node=1")
    both = lab.train(tmp_path / "two", *roles, "trainer.n_gpus_per_node=2")
    lab.assert_same(both, alone)
    apart = lab.train(
        tmp_path / "pool", *roles, "trainer.n_gpus_per_node=2",
        "reward_model.enable_resource_pool=True", "reward_model.n_gpus_per_node=1",
        "reward_model.nnodes=1",
    )  # fmt: skip
    lab.assert_same(apart, alone)


def test_the_reward_model_judges_the_greedy_answers_of_remax_too(
    lab: Lab, tmp_path: Path, reward_model: tuple[str, ...]
) -> None:
    """With sampling switched off the answers are the greedy ones: each is its own baseline."""
    rows = lab.train(
        tmp_path, *reward_model,
        "algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.do_sample=False",
        "trainer.total_training_steps=1",
    )  # fmt: skip
    assert rows[0]["critic/score/max"] != rows[0]["critic/score/min"]
    assert rows[0]["critic/advantages/max"] == pytest.approx(0, abs=1e-5)
    assert rows[0]["critic/advantages/min"] == pytest.approx(0, abs=1e-5)
