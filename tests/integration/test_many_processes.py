"""One control flow over any number of processes: the numbers of a run do not depend on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

if TYPE_CHECKING:
    from tests.conftest import Lab

STEPS = "trainer.total_training_steps=3"
PPO = (
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "critic.optim.lr=1e-3",
    "reward_model.enable=True",
    "reward_model.micro_batch_size_per_gpu=512",
)
EQUAL = (
    "actor/pg_loss", "actor/entropy", "actor/kl_loss", "critic/vf_loss",
    "critic/score/mean", "critic/score/max", "critic/rewards/mean", "response_length/mean",
)  # fmt: skip


@pytest.fixture(scope="module")
def reward_model(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier on the lab's model, with a head of its own."""
    folder = tmp_path_factory.mktemp("reward_model")
    torch.manual_seed(7)
    AutoModelForSequenceClassification.from_pretrained(lab.model, num_labels=1).save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(lab.model).save_pretrained(folder)
    return folder


def losses(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{key: row[key] for key in EQUAL if key in row} for row in rows]


def assert_same(ours: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    assert len(ours) == len(reference)
    for one, other in zip(losses(ours), losses(reference), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value == pytest.approx(other[key], rel=1e-5, abs=1e-5), key


def test_grpo_on_two_processes(lab: Lab, tmp_path: Path) -> None:
    alone = lab.train(tmp_path / "one", STEPS, "trainer.n_gpus_per_node=1")
    both = lab.train(
        tmp_path / "two", STEPS, "trainer.n_gpus_per_node=2", "trainer.test_freq=3",
        "trainer.save_freq=3",
    )  # fmt: skip
    assert_same(both, alone)
    assert "global_seqlen/balanced_max" in both[0]
    assert (tmp_path / "two/global_step_3/actor").is_dir()
    assert sorted(path.name for path in (tmp_path / "two/logs").iterdir())


def test_ppo_with_all_roles_on_two_processes(lab: Lab, tmp_path: Path, reward_model: Path) -> None:
    roles = (*PPO, f"reward_model.model.path={reward_model}", STEPS)
    alone = lab.train(tmp_path / "one", *roles, "trainer.n_gpus_per_node=1")
    both = lab.train(tmp_path / "two", *roles, "trainer.n_gpus_per_node=2")
    assert_same(both, alone)
    apart = lab.train(
        tmp_path / "pool", *roles, "trainer.n_gpus_per_node=2",
        "reward_model.enable_resource_pool=True", "reward_model.n_gpus_per_node=1",
        "reward_model.nnodes=1",
    )  # fmt: skip
    assert_same(apart, alone)


def test_the_reward_model_judges_the_greedy_answers_of_remax_too(
    lab: Lab, tmp_path: Path, reward_model: Path
) -> None:
    """With sampling switched off the answers are the greedy ones: each is its own baseline."""
    rows = lab.train(
        tmp_path, *PPO[3:], f"reward_model.model.path={reward_model}",
        "algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.do_sample=False",
        "trainer.total_training_steps=1",
    )  # fmt: skip
    assert rows[0]["critic/score/max"] != rows[0]["critic/score/min"]
    assert rows[0]["critic/advantages/max"] == pytest.approx(0, abs=1e-5)
    assert rows[0]["critic/advantages/min"] == pytest.approx(0, abs=1e-5)
