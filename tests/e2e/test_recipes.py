"""The recipes of examples/: each has its page, and runs at a small size."""

from __future__ import annotations

import importlib.util
import json
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
QUESTIONS = [
    {
        "question": f"Ann has {a} pens and buys 3.",
        "answer": f"{a}+3 = <<{a}+3={a + 3}>>{a + 3}\n#### {a + 3}",
    }
    for a in range(16)
]


def untrained_model(folder: Path) -> Path:
    """A model of two layers whose tokenizer reads any text, with the template of SmolLM2."""
    tokenizer = real("smollm2")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=1024,
            tie_word_embeddings=True, bos_token_id=tokenizer.eos_token_id, **ids,
        )
    ).save_pretrained(folder)  # fmt: skip
    return folder


def test_gsm8k(lab: Lab, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    for split in ("train", "test"):
        (raw / f"{split}.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    out = tmp_path / "out"
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


@contextmanager
def served(index: Path) -> Iterator[str]:
    """The URL of a retriever on this index."""
    with RetrieverServer(Index(index), "127.0.0.1", 0) as server:
        yield server.url
