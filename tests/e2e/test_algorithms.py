"""Every estimator, loss, aggregation and correction runs through the entry point and trains."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from caldera.config.actor import LOSS_AGG_MODES
from caldera.config.algorithm import KL_TYPES
from caldera.config.rollout_correction import ROLLOUT_CORRECTION_PRESETS
from caldera.core_algos import ADV_ESTIMATORS, POLICY_LOSSES
from caldera.trainer.main_ppo import main

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


@pytest.mark.parametrize("name", sorted(ADV_ESTIMATORS))
def test_estimator(lab: Lab, tmp_path: Path, name: str) -> None:
    rows = run(lab, tmp_path, f"algorithm.adv_estimator={name}", *NEEDS.get(name, ()))
    assert rows[0]["critic/advantages/max"] > rows[0]["critic/advantages/min"]
    assert ("timing_s/gen_max" in rows[0]) == (name == "remax")
    assert ("variance_proxy/expected_w" in rows[0]) == (name.endswith("optimal_token_baseline"))


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_policy_loss(lab: Lab, tmp_path: Path, name: str) -> None:
    rows = run(lab, tmp_path, f"{ACTOR}.policy_loss.loss_mode={name}", *NEEDS.get(name, ()))
    assert "actor/pg_loss" in rows[0]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("classic", [False, True])
def test_aggregation(lab: Lab, tmp_path: Path, mode: str, classic: bool) -> None:
    run(
        lab, tmp_path, f"{ACTOR}.loss_agg_mode={mode}",
        f"{ACTOR}.classic_loss_normalization={classic}",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=32", steps=1,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KL_TYPES)
def test_kl_in_the_loss(lab: Lab, tmp_path: Path, kind: str) -> None:
    rows = run(lab, tmp_path, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type={kind}")
    assert rows[1]["actor/kl_loss"] != 0


@pytest.mark.parametrize("kind", ["kl", "k3", "full"])
def test_kl_in_the_reward(lab: Lab, tmp_path: Path, kind: str) -> None:
    rows = run(lab, tmp_path, "algorithm.use_kl_in_reward=True", f"algorithm.kl_penalty={kind}")
    assert rows[1]["actor/reward_kl_penalty"] != 0


def test_full_kl_is_what_its_estimates_estimate(lab: Lab, tmp_path: Path) -> None:
    kl_loss = f"{ACTOR}.use_kl_loss=True"
    full = run(lab, tmp_path / "full", kl_loss, f"{ACTOR}.kl_loss_type=full")
    estimate = run(lab, tmp_path / "k3", kl_loss, f"{ACTOR}.kl_loss_type=k3")
    assert full[0]["actor/kl_loss"] == pytest.approx(estimate[0]["actor/kl_loss"], rel=0.5)
    assert full[1]["actor/kl_loss"] > 0


@pytest.mark.parametrize("preset", sorted(ROLLOUT_CORRECTION_PRESETS))
def test_rollout_correction(lab: Lab, tmp_path: Path, preset: str) -> None:
    rows = run(lab, tmp_path, f"{CORRECTION}.preset={preset}", steps=1)
    chosen = ROLLOUT_CORRECTION_PRESETS[preset]
    assert "rollout_corr/kl" in rows[0]
    assert ("rollout_corr/rollout_is_mean" in rows[0]) == (chosen.rollout_is is not None)
    assert ("rollout_corr/rollout_rs_masked_fraction" in rows[0]) == (chosen.rollout_rs is not None)
    assert ("timing_s/old_log_prob" in rows[0]) == (not chosen.bypass_mode)


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
