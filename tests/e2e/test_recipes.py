"""The recipes of examples/: each has its page, and runs at a small size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.template_tokenizers import real
from tests.verl_lines import REPOSITORY, bash

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
