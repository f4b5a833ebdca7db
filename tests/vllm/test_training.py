"""GRPO whose answers vLLM samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.engine_trials import python_of

if TYPE_CHECKING:
    from tests.conftest import Lab

pytestmark = pytest.mark.slow


def test_two_steps(lab: Lab, tmp_path: Path) -> None:
    """After the first, vLLM samples with the weights that the first has made."""
    rows = lab.train(
        tmp_path / "run",
        f"actor_rollout_ref.model.path={small_model(lab, tmp_path / 'model')}",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.engine_python={python_of('vllm')}",
        "trainer.total_training_steps=2",
    )
    assert [row["training/global_step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["training/rollout_probs_diff_max"] < 1e-3
        assert row["actor/grad_norm"] > 0


def test_an_adapter_on_two_ranks(lab: Lab, tmp_path: Path) -> None:
    """vLLM's own tensor parallelism; what it samples with is the adapter that was trained."""
    rows = lab.train(
        tmp_path / "run",
        f"actor_rollout_ref.model.path={small_model(lab, tmp_path / 'model')}",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.optim.lr=0.02",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.engine_python={python_of('vllm')}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "trainer.total_training_steps=2",
    )
    for row in rows:
        assert row["training/rollout_probs_diff_max"] < 1e-3
        assert row["actor/grad_norm"] > 0


def small_model(lab: Lab, folder: Path) -> Path:
    """With heads of 32, which is the least that vLLM's kernels for CPUs take."""
    tokenizer = AutoTokenizer.from_pretrained(lab.model)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
