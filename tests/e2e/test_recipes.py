"""The recipes of examples/: each has its page, and runs at a small size."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from caldera.search_agent.retriever import BuildOptions, Index, RetrieverServer, build_index
from tests.template_tokenizers import real
from tests.verl_lines import REPOSITORY, bash, metrics, talkative_model

if TYPE_CHECKING:
    from tests.conftest import Lab

EXAMPLES = REPOSITORY / "examples"
RECIPES = sorted(path.parent for path in EXAMPLES.glob("*/README.md"))
NO_RECIPES = {"cluster", "curriculum", "notebooks"}
"""Examples that train nothing, or that have no band to expect."""
SECTIONS = ("Run", "What it shows", "Expected", "Hardware")
QUESTIONS = [
    {
        "question": f"Ann has {a} pens and buys 3.",
        "answer": f"{a}+3 = <<{a}+3={a + 3}>>{a + 3}\n#### {a + 3}",
    }
    for a in range(16)
]


def raw_gsm8k(folder: Path) -> Path:
    """A folder with few questions, in the files of GSM8K."""
    raw = folder / "raw"
    raw.mkdir()
    for split in ("train", "test"):
        (raw / f"{split}.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    return raw


def untrained_model(folder: Path, template: str = "smollm2") -> Path:
    """A model of two layers whose tokenizer reads any text, with the chat template of a family."""
    tokenizer = real(template)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=4096,
            tie_word_embeddings=True, bos_token_id=tokenizer.eos_token_id, **ids,
        )
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.mark.parametrize("folder", RECIPES, ids=lambda folder: folder.name)
def test_a_recipe_is_listed_and_says_what_to_expect(folder: Path) -> None:
    listed = (REPOSITORY / "docs/recipes.md").read_text()
    assert f"(../examples/{folder.name}/README.md)" in listed
    if folder.name not in NO_RECIPES:
        titles = re.findall(r"^## (.+)$", (folder / "README.md").read_text(), re.MULTILINE)
        assert [title for title in titles if title in SECTIONS] == list(SECTIONS)


@pytest.mark.slow
def test_gsm8k(lab: Lab, tmp_path: Path) -> None:
    raw, out = raw_gsm8k(tmp_path), tmp_path / "out"
    small = [
        "data.train_batch_size=4", "data.max_prompt_length=512", "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=2",
    ]  # fmt: skip
    variables = {"RAW": str(raw), "LIMIT": "8", "STEPS": "1"}
    bash(
        lab, tmp_path, f"bash {EXAMPLES}/gsm8k_grpo/run_smollm2.sh", *small, **variables,
        OUT=str(out), MODEL=str(untrained_model(tmp_path / "model")), SEED="3", SFT_EPOCHS="1",
        SFT_KEYS="data.train_batch_size=4",
    )  # fmt: skip
    bash(
        lab, tmp_path, f"bash {EXAMPLES}/gsm8k_lora/run_smollm2.sh", *small,
        f"trainer.default_local_dir={tmp_path / 'lora'}", OUT=str(out), SEED="3", **variables,
    )  # fmt: skip
    assert "lora_rank: 64" in (tmp_path / "lora/config.yaml").read_text()
    bash(
        lab, tmp_path, f"bash {EXAMPLES}/gsm8k_grpo/run_qwen.sh", *small, **variables,
        OUT=str(tmp_path / "qwen"), MODEL=str(tmp_path / "model"),
    )  # fmt: skip
    (start,) = (out / "sft-seed3").glob("global_step_*")
    assert f"path: {start}/actor/huggingface" in (out / "grpo-seed3/config.yaml").read_text()
    table = bash(
        lab, tmp_path, f"python3 {EXAMPLES}/band.py {out}/grpo-seed3 {tmp_path}/qwen/seed1",
        "--svg", str(tmp_path / "curve.svg"),
    ).stdout  # fmt: skip
    assert "val-core/openai/gsm8k/acc/mean@1" in table
    assert "| 1 | 0.0% | 0.0% | 0.0% | 0.00% | 0.00% |" in table
    assert (tmp_path / "curve.svg").read_text().startswith("<svg")


def test_grpo_in_one_file_has_the_numbers_of_the_trainer(lab: Lab, tmp_path: Path) -> None:
    grpo = load(EXAMPLES / "single_file_grpo/grpo.py")
    settings = grpo.Settings(
        questions=25, samples=16, mini_batch=5, prompt_tokens=6, warmup_steps=2, steps=4,
        test_every=2,
    )  # fmt: skip
    policy = grpo.Policy(str(lab.model), settings)
    questions = grpo.read_questions(lab.train_file, policy.tokenizer)
    ours = list(grpo.train(policy, questions, questions))
    theirs = lab.train(
        tmp_path / "run", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=null",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "trainer.total_training_steps=4", "trainer.test_freq=2", "trainer.val_before_train=True",
    )  # fmt: skip
    assert len(ours) == len(theirs) == 5
    names = {
        "reward": "critic/score/mean", "loss": "actor/pg_loss", "lr": "actor/lr",
        "grad_norm": "actor/grad_norm", "accuracy": "val-core/caldera/arithmetic/acc/mean@1",
    }  # fmt: skip
    for one, other in zip(ours, theirs, strict=True):
        same = {name: one[name] for name in names if name in one}
        assert same == pytest.approx(
            {name: other[names[name]] for name in same}, rel=1e-4, abs=1e-6
        )
    assert ours[1]["reward"] != ours[-1]["reward"]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_sft_then_rl(lab: Lab, tmp_path: Path) -> None:
    bash(
        lab, tmp_path, f"bash {EXAMPLES}/sft_then_rl/run.sh", "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", OUT=str(tmp_path), SFT_STEPS="2",
        STEPS="1",
    )  # fmt: skip
    sft, grpo = (lab.metrics(tmp_path / f"{stage}-seed1") for stage in ("sft", "grpo"))
    assert sft[-1]["val/loss"] < sft[0]["train/loss"]
    assert grpo[-1]["step"] == 1 and "actor/pg_loss" in grpo[-1]


def test_a_reward_model_and_ppo(lab: Lab, tmp_path: Path) -> None:
    bash(
        lab, tmp_path, f"bash {EXAMPLES}/reward_model_ppo/run.sh", "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", "critic.ppo_mini_batch_size=8",
        OUT=str(tmp_path), MODEL=str(lab.model), RM_STEPS="2", STEPS="1",
    )  # fmt: skip
    last = lab.metrics(tmp_path / "ppo-seed1")[-1]
    assert last["critic/score/max"] > last["critic/score/min"]
    assert "critic/vf_loss" in last and last["actor/kl_loss"] >= 0
    assert "val-core/caldera/arithmetic/acc/mean@1" in last
    rm = lab.metrics(tmp_path / "rm-seed1")[-1]
    assert 0 <= rm["val/accuracy"] <= 1


@pytest.mark.slow
def test_retool(lab: Lab, tmp_path: Path) -> None:
    load(EXAMPLES / "retool/tiny_task.py").main(tmp_path / "task", lessons=60)
    small = ["data.train_batch_size=8", "actor_rollout_ref.rollout.n=2"]
    bash(
        lab, tmp_path, f"bash {EXAMPLES}/retool/run_cpu.sh", *small, OUT=str(tmp_path), STEPS="1",
    )  # fmt: skip
    last = lab.metrics(tmp_path / "seed1")[-1]
    assert last["tool_calls/code_interpreter/ok"] > 0

    variables = {"RAW": str(raw_gsm8k(tmp_path)), "LIMIT": "8", "OUT": str(tmp_path / "gpu")}
    bash(
        lab, tmp_path, f"bash {EXAMPLES}/retool/run_gpu.sh", *small, "data.max_response_length=8",
        "data.max_prompt_length=2048",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.val_before_train=False",
        MODEL=str(untrained_model(tmp_path / "model", "qwen2.5")), STEPS="1", **variables,
    )  # fmt: skip
    assert "num_turns/mean" in lab.metrics(tmp_path / "gpu/seed1")[-1]


@pytest.mark.slow
def test_search_r1(lab: Lab, tmp_path: Path) -> None:
    load(EXAMPLES / "search_r1/tiny_task.py").main(tmp_path / "cpu/task", lessons=60)
    variables = {"PORT": str(free_port()), "STEPS": "1"}
    bash(
        lab, tmp_path, f"bash {EXAMPLES}/search_r1/run_cpu.sh", "actor_rollout_ref.rollout.n=2",
        OUT=str(tmp_path / "cpu"), **variables,
    )  # fmt: skip
    assert lab.metrics(tmp_path / "cpu/seed1")[-1]["env/number_of_valid_search"] > 0

    raw, model = tmp_path / "raw", untrained_model(tmp_path / "model")
    raw.mkdir()
    rows = [{"source": "nq", "question": f"Who is {n}?", "answers": [str(n)]} for n in range(40)]
    (raw / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bash(
        lab, tmp_path, f"bash {EXAMPLES}/search_r1/run_gpu.sh", "actor_rollout_ref.rollout.n=2",
        "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.max_response_length=8", "data.max_obs_length=8", "trainer.val_before_train=False",
        OUT=str(tmp_path / "gpu"), RAW=str(raw), MODEL=str(model),
        CORPUS=str(tmp_path / "cpu/task/corpus.jsonl"), **variables,
    )  # fmt: skip
    assert "env/finish_ratio" in lab.metrics(tmp_path / "gpu/seed1")[-1]


SEARCH_R1 = """\
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \\
  data.train_files=$DATA/train.parquet data.val_files=$DATA/test.parquet \\
  data.train_data_num=null data.val_data_num=null data.train_batch_size=512 \\
  data.val_batch_size=256 data.max_prompt_length=4096 data.max_response_length=500 \\
  data.max_start_length=2048 data.max_obs_length=500 data.shuffle_train_dataloader=True \\
  algorithm.adv_estimator=grpo actor_rollout_ref.model.path=$MODEL \\
  actor_rollout_ref.model.enable_gradient_checkpointing=true \\
  actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.optim.lr=1e-6 \\
  actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285 \\
  actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
  actor_rollout_ref.actor.ppo_micro_batch_size=64 \\
  actor_rollout_ref.actor.fsdp_config.param_offload=true \\
  actor_rollout_ref.actor.fsdp_config.grad_offload=true \\
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \\
  actor_rollout_ref.rollout.log_prob_micro_batch_size=128 \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.name=vllm \\
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
  actor_rollout_ref.ref.log_prob_micro_batch_size=128 \\
  actor_rollout_ref.ref.fsdp_config.param_offload=True \\
  actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
  algorithm.no_think_rl=false actor_rollout_ref.rollout.n_agent=5 \\
  actor_rollout_ref.rollout.temperature=1 actor_rollout_ref.actor.state_masking=true \\
  trainer.logger=['wandb'] +trainer.val_only=false +trainer.val_before_train=true \\
  trainer.default_hdfs_dir=null trainer.n_gpus_per_node=8 trainer.nnodes=1 \\
  trainer.save_freq=100 trainer.test_freq=50 trainer.project_name=Search-R1 \\
  trainer.experiment_name=nq trainer.total_epochs=15 trainer.total_training_steps=1005 \\
  trainer.default_hdfs_dir=null trainer.default_local_dir=verl_checkpoints/nq max_turns=2 \\
  retriever.url="http://127.0.0.1:8000/retrieve" retriever.topk=3"""
"""The command of Search-R1's launch script for GRPO."""


def test_search_r1s_own_command(lab: Lab, tmp_path: Path) -> None:
    variables = talkative_model(tmp_path)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "\\"Ada\\"\\nAda 42"}\n')
    build_index([corpus], tmp_path / "index", BuildOptions())
    with served(tmp_path / "index") as url:
        done = bash(
            lab, tmp_path, SEARCH_R1, f"retriever.url={url}", "data.max_prompt_length=64",
            "data.max_start_length=8", "data.max_response_length=6", "data.max_obs_length=16",
            "data.train_batch_size=4", "data.val_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.n_gpus_per_node=1",
            "actor_rollout_ref.rollout.name=native", "trainer.logger=console",
            "trainer.total_training_steps=1",
            **variables,
        )  # fmt: skip
    told = metrics(done)
    assert told["env/number_of_valid_search"] > 0
    assert 0 < told["state_tokens/coverage"] < 1


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def served(index: Path) -> Iterator[str]:
    """The URL of a retriever on this index."""
    with RetrieverServer(Index(index), "127.0.0.1", 0) as server:
        yield server.url
