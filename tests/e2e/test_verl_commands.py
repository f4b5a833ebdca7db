"""verl's command lines, under verl's own module names, with small models and data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from tests.conftest import Lab, Lessons

REPOSITORY = Path(__file__).parents[2]
EXTENSION = """
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss
from verl.workers.reward_manager import NaiveRewardManager, register


@register_adv_est("mine")
def advantages(token_level_rewards, response_mask, config=None, **kwargs):
    assert config.get("gamma") == 1.0
    scores = token_level_rewards.sum(-1, keepdim=True)
    return (scores - scores.mean()) * response_mask, token_level_rewards


@register_policy_loss("mine")
def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
         rollout_is_weights=None):
    assert config.policy_loss.get("loss_mode") == "mine"
    return agg_loss(-log_prob * advantages, response_mask, loss_agg_mode), {"actor/mine": 7.0}


@register("mine")
class Manager(NaiveRewardManager):
    pass
"""
SCORER = """
from verl.utils.reward_score import default_compute_score


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    score = default_compute_score(data_source, solution_str, ground_truth, extra_info)
    score = score if isinstance(score, dict) else {"score": score}
    return {**score, "length": len(solution_str)}
"""


def verl(lab: Lab, folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that must succeed, with what stands in its folder importable."""
    paths = (REPOSITORY, REPOSITORY / "compat" / "verl", folder)
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=folder, text=True, capture_output=True,
        env=lab.environment | {"PYTHONPATH": ":".join(map(str, paths)), "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def ppo(lab: Lab) -> list[str]:
    """The documented PPO command: its keys, with other paths and sizes."""
    return [
        f"data.train_files={lab.train_file}", f"data.val_files={lab.test_file}",
        "data.train_batch_size=16", "data.max_prompt_length=6", "data.max_response_length=4",
        f"actor_rollout_ref.model.path={lab.model}", "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4", "critic.optim.lr=1e-5",
        f"critic.model.path={lab.model}", "critic.ppo_micro_batch_size_per_gpu=4",
        "algorithm.kl_ctrl.kl_coef=0.001", "trainer.logger=console",
        "trainer.val_before_train=False", "trainer.n_gpus_per_node=1", "trainer.nnodes=1",
        "trainer.save_freq=10", "trainer.test_freq=10", "trainer.total_epochs=3",
    ]  # fmt: skip


@pytest.mark.slow
def test_ppo_and_the_model_merger(lab: Lab, tmp_path: Path) -> None:
    run_dir, model = tmp_path / "run", tmp_path / "model"
    arguments = ["trainer.save_freq=1", f"trainer.default_local_dir={run_dir}"]
    arguments += ["trainer.total_epochs=1", "trainer.total_training_steps=1"]
    done = verl(lab, tmp_path, "verl.trainer.main_ppo", *ppo(lab), *arguments)
    assert "step:1 - " in done.stdout and "critic/vf_loss:" in done.stdout
    actor = run_dir / "global_step_1" / "actor"
    options = ["--backend", "fsdp", "--local_dir", str(actor)]
    done = verl(
        lab, tmp_path, "verl.model_merger", "merge", *options, "--target_dir", str(model),
        "--hf_model_path", str(lab.model),
    )  # fmt: skip
    assert "largest difference 0" in done.stdout
    assert AutoModelForCausalLM.from_pretrained(model).num_parameters() > 0
    done = verl(lab, tmp_path, "verl.model_merger", "test", *options, "--test_hf_dir", str(model))
    assert "all are equal" in done.stdout


@pytest.mark.slow
def test_grpo_with_extensions_of_verls(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "extension.py").write_text(EXTENSION)
    (tmp_path / "scorer.py").write_text(SCORER)
    done = verl(
        lab, tmp_path, "verl.trainer.main_ppo", "--config-path=config",
        "--config-name=ppo_trainer.yaml", *lab.overrides(tmp_path / "run"),
        f"data.train_files=['{lab.train_file}']", f"data.val_files=['{lab.test_file}']",
        "algorithm.adv_estimator=mine", "actor_rollout_ref.actor.policy_loss.loss_mode=mine",
        "algorithm.use_kl_in_reward=False", "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.model.use_remove_padding=True", "actor_rollout_ref.actor.strategy=fsdp",
        "actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        "actor_rollout_ref.rollout.top_p=0.9", "+actor_rollout_ref.model.external_lib=extension",
        "reward_model.reward_manager=mine", "custom_reward_function.path=scorer.py",
        "trainer.logger=['console','file']", "trainer.total_training_steps=1",
        "trainer.test_freq=1",
    )  # fmt: skip
    assert "step:1 - " in done.stdout and "actor/mine:7" in done.stdout
    last: dict[str, Any] = lab.metrics(tmp_path / "run")[-1]
    assert last["val-aux/caldera/arithmetic/length/mean@1"] > 0


@pytest.mark.slow
def test_generation_and_evaluation(lab: Lab, tmp_path: Path) -> None:
    answers = tmp_path / "out.parquet"
    verl(
        lab, tmp_path, "verl.trainer.main_generation", f"model.path={lab.model}",
        f"data.path={lab.test_file}", "data.prompt_key=prompt", "data.n_samples=5",
        f"data.output_path={answers}", "data.batch_size=128", "rollout.temperature=1.0",
        "rollout.top_k=50", "rollout.top_p=0.7", "rollout.prompt_length=6",
        "rollout.response_length=4", "trainer.n_gpus_per_node=1",
    )  # fmt: skip
    assert {len(row) for row in pq.read_table(answers)["responses"].to_pylist()} == {5}
    done = verl(
        lab, tmp_path, "verl.trainer.main_eval", f"data.path={answers}", "data.prompt_key=prompt",
        "data.response_key=responses", "data.data_source_key=data_source",
        "data.reward_model_key=reward_model",
    )  # fmt: skip
    assert "{'test_score/caldera/arithmetic': " in done.stdout


@pytest.mark.slow
def test_fine_tuning(lessons: Lessons, tmp_path: Path) -> None:
    more = ["trainer.logger=console", "trainer.total_training_steps=1"]
    arguments = lessons.overrides(tmp_path / "run", *more)
    done = verl(lessons.lab, tmp_path, "verl.trainer.fsdp_sft_trainer", *arguments)
    assert "step:1 - train/loss:" in done.stdout
    shown = verl(lessons.lab, tmp_path, "verl.trainer.sft_trainer", "--cfg", "job", *arguments)
    assert "  use_dynamic_bsz: true\n" in shown.stdout  # as in the file of later releases
