"""Every estimator, loss, aggregation and correction trains.

Most of them learn from one stored rollout, in one trainer; some run through the entry point.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from caldera.config import PPOTrainerConfig, load_config, needs_critic, needs_reference
from caldera.config.actor import LOSS_AGG_MODES
from caldera.config.algorithm import KL_TYPES
from caldera.config.rollout_correction import ROLLOUT_CORRECTION_PRESETS
from caldera.core_algos import ADV_ESTIMATORS, POLICY_LOSSES, get_kl_controller
from caldera.protocol import DataProto
from caldera.trainer.groups import make_groups_for
from caldera.trainer.main_ppo import main
from caldera.trainer.metrics import Metrics
from caldera.trainer.ppo.advantage import check_algorithm
from caldera.trainer.ppo.metrics import compute_data_metrics
from caldera.trainer.ppo.setup import TaskRunner, settle

if TYPE_CHECKING:
    from tests.conftest import Lab

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
NEEDS = {
    "grpo_passk": ("actor_rollout_ref.rollout.n=2",),  # it learns where one alone is the best
    "gdpo": ("algorithm.gdpo_reward_keys=[acc]",),
    "optimal_token_baseline": (f"{ACTOR}.calculate_sum_pi_squared=True",),
    "tir_optimal_token_baseline": (f"{ACTOR}.calculate_sum_pi_squared=True",),
    "dro": (f"{ACTOR}.policy_loss.dro_beta=0.1",),
    "bypass_mode": (f"{CORRECTION}.bypass_mode=True",),
}
"""What else an estimator or a loss asks for, or needs to learn in two steps."""

SAMPLED_OTHERWISE = ("gdpo", "grpo_passk", "remax")
"""Estimators for which other responses are sampled, or scored in another way."""

OWN = """
import torch

def advantage(token_level_rewards, response_mask, config, **kwargs):
    score = token_level_rewards.sum(-1, keepdim=True) - 0.5
    advantages = score * response_mask
    return advantages, advantages

def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
         rollout_is_weights=None):
    ratio = (log_prob - old_log_prob).exp()
    value = -(advantages * ratio * response_mask).sum() / response_mask.sum()
    return value, {"actor/own": value.detach()}
"""


def run(lab: Lab, folder: Path, *overrides: str, steps: int = 2) -> list[dict[str, Any]]:
    """A short run in this process; returns its metrics, all of which are finite."""
    arguments = lab.overrides(folder, f"trainer.total_training_steps={steps}", *overrides)
    assert main(arguments) == 0
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line)["data"] for line in lines]
    assert len(rows) == steps
    for row in rows:
        assert all(math.isfinite(value) for value in row.values()), row
        assert row["actor/grad_norm"] > 0
    return rows


class StoredRollout:
    """A trainer in this process after one step, and the scored batch of that step.

    Other algorithms begin with the weights of that trainer, and learn from copies of the batch.
    """

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab, self._folder = lab, folder
        self._config = self._load("algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=True")
        self._trainer = TaskRunner(make_groups_for(self._config)).build(self._config)
        evaluate = self._trainer.evaluate

        def keep(batch: DataProto, metrics: Metrics, timing: dict[str, float]) -> None:
            self._batch = copy.deepcopy(batch)
            evaluate(batch, metrics, timing)

        self._trainer.evaluate = keep  # type: ignore[method-assign]
        self._trainer.init_workers()
        for name, group in self._trainer.models.items():
            group.save_checkpoint(folder / "start" / name)
        self._trainer.fit()
        self._trainer.evaluate = evaluate  # type: ignore[method-assign]
        self._critic = self._trainer.critic

    def train(self, *overrides: str, steps: int = 2) -> list[dict[str, float]]:
        """The metrics of some steps, all of which are finite, and of their phases' seconds."""
        chosen, trainer = self._load(*overrides), self._trainer
        check_algorithm(chosen)
        # Trainer and workers hold these very objects.
        vars(self._config.algorithm).update(vars(chosen.algorithm))
        actor = self._config.actor_rollout_ref.actor
        optim = actor.optim
        vars(actor).update(vars(chosen.actor_rollout_ref.actor) | {"optim": optim})
        trainer.kl_controller = get_kl_controller(chosen.algorithm.kl_ctrl)
        trainer.use_reference = needs_reference(chosen)
        trainer.critic = self._critic if needs_critic(chosen) else None
        for name, group in trainer.models.items():
            group.load_checkpoint(self._folder / "start" / name)
        rows = [self._step() for _ in range(steps)]
        for row in rows:
            assert all(math.isfinite(value) for value in row.values()), row
            assert row["actor/grad_norm"] > 0
        return rows

    def _step(self) -> dict[str, float]:
        batch, metrics, timing = copy.deepcopy(self._batch), Metrics(), dict[str, float]()
        self._trainer.evaluate(batch, metrics, timing)
        batch = self._trainer.advantage(batch, metrics, timing)
        self._trainer.update(batch, metrics, timing)
        metrics |= compute_data_metrics(batch, self._trainer.critic is not None)
        return metrics | {f"timing_s/{phase}": seconds for phase, seconds in timing.items()}

    def _load(self, *overrides: str) -> PPOTrainerConfig:
        arguments = self._lab.overrides(self._folder, "trainer.total_training_steps=1", *overrides)
        config = load_config(arguments)
        settle(config, 0)
        return config

    def close(self) -> None:
        self._trainer.shutdown()


@pytest.fixture(scope="module")
def stored(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredRollout]:
    rollout = StoredRollout(lab, tmp_path_factory.mktemp("stored"))
    yield rollout
    rollout.close()


@pytest.mark.parametrize("name", sorted(set(ADV_ESTIMATORS) - set(SAMPLED_OTHERWISE)))
def test_estimator(stored: StoredRollout, name: str) -> None:
    rows = stored.train(f"algorithm.adv_estimator={name}", *NEEDS.get(name, ()))
    assert rows[0]["critic/advantages/max"] > rows[0]["critic/advantages/min"]
    assert ("critic/vf_loss" in rows[0]) == (name == "gae")


@pytest.mark.parametrize("name", ["grpo", "gae", "optimal_token_baseline", *SAMPLED_OTHERWISE])
def test_a_run_with_an_estimator(lab: Lab, tmp_path: Path, name: str) -> None:
    rows = run(lab, tmp_path, f"algorithm.adv_estimator={name}", *NEEDS.get(name, ()))
    assert rows[0]["critic/advantages/max"] > rows[0]["critic/advantages/min"]
    assert ("timing_s/gen_max" in rows[0]) == (name == "remax")
    assert ("variance_proxy/expected_w" in rows[0]) == (name.endswith("optimal_token_baseline"))


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_policy_loss(stored: StoredRollout, name: str) -> None:
    rows = stored.train(f"{ACTOR}.policy_loss.loss_mode={name}", *NEEDS.get(name, ()))
    assert "actor/pg_loss" in rows[0]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("classic", [False, True])
def test_aggregation(stored: StoredRollout, mode: str, classic: bool) -> None:
    stored.train(
        f"{ACTOR}.loss_agg_mode={mode}", f"{ACTOR}.classic_loss_normalization={classic}",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=32", steps=1,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KL_TYPES)
def test_kl_in_the_loss(stored: StoredRollout, kind: str) -> None:
    rows = stored.train(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type={kind}")
    assert rows[1]["actor/kl_loss"] != 0


@pytest.mark.parametrize("kind", ["kl", "k3", "full"])
def test_kl_in_the_reward(stored: StoredRollout, kind: str) -> None:
    rows = stored.train("algorithm.use_kl_in_reward=True", f"algorithm.kl_penalty={kind}")
    assert rows[1]["actor/reward_kl_penalty"] != 0


def test_full_kl_is_what_its_estimates_estimate(stored: StoredRollout) -> None:
    kl_loss = f"{ACTOR}.use_kl_loss=True"
    full = stored.train(kl_loss, f"{ACTOR}.kl_loss_type=full")
    estimate = stored.train(kl_loss, f"{ACTOR}.kl_loss_type=k3")
    assert full[0]["actor/kl_loss"] == pytest.approx(estimate[0]["actor/kl_loss"], rel=0.5)
    assert full[1]["actor/kl_loss"] > 0


@pytest.mark.parametrize("preset", sorted(ROLLOUT_CORRECTION_PRESETS))
def test_rollout_correction(stored: StoredRollout, preset: str) -> None:
    (row,) = stored.train(f"{CORRECTION}.preset={preset}", steps=1)
    chosen = ROLLOUT_CORRECTION_PRESETS[preset]
    assert "rollout_corr/kl" in row
    assert ("rollout_corr/rollout_is_mean" in row) == (chosen.rollout_is is not None)
    assert ("rollout_corr/rollout_rs_masked_fraction" in row) == (chosen.rollout_rs is not None)
    assert ("timing_s/old_log_prob" in row) == (not chosen.bypass_mode)


def test_a_run_with_rollout_correction(lab: Lab, tmp_path: Path) -> None:
    (row,) = run(lab, tmp_path, f"{CORRECTION}.preset=bypass_ppo_clip", steps=1)
    assert "rollout_corr/kl" in row and "timing_s/old_log_prob" not in row


def test_pf_ppo(lab: Lab, tmp_path: Path) -> None:
    rows = run(lab, tmp_path, "algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=True")
    # Weights are squared scores: samples without a reward are never drawn, though they were there.
    assert rows[0]["critic/score/mean"] == 1.0


def test_dynamic_sampling_refills(lab: Lab, tmp_path: Path) -> None:
    """Of 25 prompts some have answers that are all right or all wrong."""
    rows = run(
        lab, tmp_path,
        "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc",
        "data.gen_batch_size=10", f"trainer.rollout_data_dir={tmp_path / 'answers'}",
    )  # fmt: skip
    assert rows[0]["training/num_gen_batches"] > 2
    assert rows[0]["training/filter_groups/evicted_samples"] % 16 == 0
    assert 0 < rows[0]["training/filter_groups/kept_ratio"] <= 1
    assert 0 < rows[0]["critic/score/mean"] < 1


def test_dynamic_sampling_gives_up(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = lab.overrides(
        tmp_path, "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_num_gen_batches=2", "data.gen_batch_size=1",
    )  # fmt: skip
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert "algorithm.filter_groups.max_num_gen_batches=2" in message
    assert "of the 25 prompts" in message


def test_functions_of_ones_own(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    rows = run(
        lab, tmp_path / "run",
        f"algorithm.adv_estimator={file}:advantage",
        f"{ACTOR}.policy_loss.loss_mode={file}:loss",
    )  # fmt: skip
    assert rows[0]["critic/advantages/max"] == 0.5
    assert rows[0]["actor/own"] == rows[0]["actor/pg_loss"]
