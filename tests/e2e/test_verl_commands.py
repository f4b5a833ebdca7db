"""verl's command lines, under verl's own module names, with small models and data."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from transformers import AutoModelForCausalLM

from caldera.search_agent.retriever import BuildOptions, Index, RetrieverServer, build_index
from tests.verl_lines import (
    BEFORE,
    PPO,
    SEARCH,
    START,
    TOOLS,
    bash,
    metrics,
    small,
    talkative_model,
    tools_of_verls,
)

if TYPE_CHECKING:
    from tests.conftest import Lab, Lessons

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
SAME = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean")
SCRIPT = """#!/usr/bin/env bash
# GRPO on sums.
set -euxo pipefail
sampling=(
    actor_rollout_ref.rollout.n=4  # answers
    actor_rollout_ref.rollout.temperature=${TEMPERATURE:-1.0}
)
folder=$(basename "$MODEL")-run
batch=$((4 * 2))

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="['$DATA/train.parquet']" data.val_files="['$DATA/test.parquet']" \\
    data.train_batch_size=${batch} data.max_prompt_length=6 data.max_response_length=4 \\
    data.truncation='error' \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=1e-3 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=$((batch / 2)) \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    critic.optim.lr='${actor_rollout_ref.actor.optim.lr}' \\
    "${sampling[@]}" trainer.logger='["console"]' trainer.val_before_train=False \\
    trainer.default_local_dir=$folder trainer.total_training_steps=1 "$@" 2>&1 | tee log
"""


def verl(lab: Lab, folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that must succeed."""
    return bash(lab, folder, f"python3 -m {module}", *arguments)


def test_ppo_and_the_model_merger(lab: Lab, tmp_path: Path) -> None:
    run_dir, model = tmp_path / "run", tmp_path / "model"
    arguments = ["trainer.save_freq=1", f"trainer.default_local_dir={run_dir}"]
    arguments += ["trainer.total_epochs=1", "trainer.total_training_steps=1", *small(lab)]
    done = bash(lab, tmp_path, f"{START} {PPO}", *arguments)
    assert "critic/vf_loss" in metrics(done)
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
        "trainer.test_freq=1", "trainer.console_metrics=[short,actor/mine]",
    )  # fmt: skip
    assert "step:1 - " in done.stdout and "actor/mine:7" in done.stdout
    last: dict[str, Any] = lab.metrics(tmp_path / "run")[-1]
    assert last["val-aux/caldera/arithmetic/length/mean@1"] > 0


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
    served = tmp_path / "served.parquet"
    rollout = "actor_rollout_ref.rollout"
    verl(
        lab, tmp_path, "verl.trainer.main_generation_server",
        f"data.train_files=['{lab.test_file}']", f"+data.output_path={served}",
        f"actor_rollout_ref.model.path={lab.model}",
        f"{rollout}.n=5", f"{rollout}.top_k=50", f"{rollout}.top_p=0.7", f"{rollout}.name=native",
        "data.max_prompt_length=6", "data.max_response_length=4", "trainer.n_gpus_per_node=1",
    )  # fmt: skip
    assert pq.read_table(served).equals(pq.read_table(answers))
    done = verl(
        lab, tmp_path, "verl.trainer.main_eval", f"data.path={answers}", "data.prompt_key=prompt",
        "data.response_key=responses", "data.data_source_key=data_source",
        "data.reward_model_key=reward_model",
    )  # fmt: skip
    assert "{'test_score/caldera/arithmetic': " in done.stdout


def test_fine_tuning(lessons: Lessons, tmp_path: Path) -> None:
    more = ["trainer.logger=console", "trainer.total_training_steps=1"]
    arguments = lessons.overrides(tmp_path / "run", *more)
    done = verl(lessons.lab, tmp_path, "verl.trainer.fsdp_sft_trainer", *arguments)
    assert "step:1 - train/loss:" in done.stdout
    shown = verl(lessons.lab, tmp_path, "verl.trainer.sft_trainer", "--cfg", "job", *arguments)
    assert "  use_dynamic_bsz: true\n" in shown.stdout  # as in the file of later releases


def test_tools_on_ranks_that_share_sequences(lab: Lab, tmp_path: Path) -> None:
    """Several turns with a sandbox for code, clip-higher, Ulysses, no KL."""
    variables = talkative_model(tmp_path)
    with tools_of_verls(tmp_path):
        done = bash(
            lab, tmp_path, f"{START} {' '.join(BEFORE)} {TOOLS}", "data.max_response_length=32",
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
            "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.val_kwargs.n=2",
            "trainer.n_gpus_per_node=2", "trainer.total_training_steps=1",
            f"trainer.default_local_dir={tmp_path / 'run'}", **variables,
        )  # fmt: skip
    told = metrics(done)
    assert told["tool_calls/code_interpreter/ok"] > 0
    assert told["num_turns/max"] > 3 and "actor/grad_norm" in told


def test_the_search_agent(lab: Lab, tmp_path: Path) -> None:
    variables = talkative_model(tmp_path)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "\\"Ada\\"\\nAda 42"}\n')
    build_index([corpus], tmp_path / "index", BuildOptions())
    with RetrieverServer(Index(tmp_path / "index"), "127.0.0.1", 0) as server:
        done = bash(
            lab, tmp_path, f"{START} {' '.join(BEFORE)} {SEARCH}",
            f"retriever.url={server.url}", "data.max_response_length=6",
            "data.max_obs_length=16",
            "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4",
            "trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path / 'run'}",
            **variables,
        )  # fmt: skip
    told = metrics(done)
    assert told["env/number_of_valid_search"] > 0
    assert 0 < told["state_tokens/coverage"] < 1


def test_what_a_script_is_migrated_to_runs_as_the_script_does(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    theirs = metrics(bash(lab, tmp_path, "bash run.sh"))
    assert (tmp_path / "model-run").is_dir()
    shutil.rmtree(tmp_path / "model-run")
    told = bash(lab, tmp_path, "python3 -m caldera.cli migrate run.sh").stdout
    _, _, command = told.partition("The same here\n")
    command = command.partition("\n\n")[0].replace("caldera train", "python3 -m caldera.cli train")
    ours = metrics(bash(lab, tmp_path, command))
    assert (tmp_path / "model-run").is_dir()
    assert {key: ours[key] for key in SAME} == {key: theirs[key] for key in SAME}
