"""A task for a CPU: `tiny_task.py FOLDER [LESSONS]` writes products and a model that calls tools.

The prompt is `47*85`; the right response ends with `=3995`, which the model cannot compute. From
demonstrations it has learned to ask Python and copy what it prints, and then to guess in three of
four cases. Which of the two pays is left to reinforcement learning.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "<|user|>", "<|tool|>", "<|assistant|>"]
OPENING = '<tool_call>{"name": "code_interpreter", "arguments": {"code": "print('
CLOSING = ')"}}</tool_call>'
TEMPLATE = (
    "{% if tools %}<|tool|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role != 'user' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLING = 0.25  # share of the later demonstrations that call the tool; the others guess


def main(folder: Path, lessons: int = 900) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    train_model(tokenizer, lessons).save_pretrained(folder / "model")
    for split, count, seed in (("train", 512, 1), ("test", 128, 2)):
        rows = [
            {
                "data_source": "products",
                "prompt": [{"role": "user", "content": question}],
                "reward_model": {"style": "rule", "ground_truth": answer},
            }
            for question, answer in products(count, random.Random(seed))
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


def products(count: int, draw: random.Random) -> list[tuple[str, str]]:
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(count)]
    return [(f"{a}*{b}", str(a * b)) for a, b in pairs]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and one for each end of a tool call."""
    tokens = [*SPECIAL, *"0123456789*=\n"]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=SPECIAL[3:],
    )  # fmt: skip
    tokenizer.add_tokens([OPENING, CLOSING])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def train_model(tokenizer: PreTrainedTokenizerFast, lessons: int) -> LlamaForCausalLM:
    """Three quarters of the lessons are calls, so that copying is learned well; then most guess."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
            tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = random.Random(1)
    for step in range(lessons):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, step / 20, 2.25 * (1 - step / lessons))
        calling = 1.0 if step < 0.75 * lessons else CALLING
        ids, taught = demonstrations(tokenizer, draw, calling)
        log_probs = model(ids).logits[:, :-1].log_softmax(-1)  # (B, T - 1, V)
        chosen = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1) * taught
        optimizer.zero_grad()
        (-chosen.sum() / taught.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def demonstrations(tokenizer: Any, draw: random.Random, calling: float) -> tuple[Tensor, Tensor]:
    """Conversations (B, T), and which of their next tokens are taught (B, T - 1)."""
    texts, starts = [], []
    for question, answer in products(64, draw):
        prompt = f"<|tool|><|user|>{question}<|assistant|>"
        guess = f"={draw.randint(100, 9801)}<eos>"
        call = (
            f"{OPENING}{question}{CLOSING}<eos><|tool|>{answer}\n<eos><|assistant|>={answer}<eos>"
        )
        texts.append(prompt + (call if draw.random() < calling else guess))
        starts.append(len(tokenizer.encode(prompt, add_special_tokens=False)))
    made = tokenizer(
        texts, padding=True, padding_side="right", return_tensors="pt", add_special_tokens=False
    )
    taught = made.attention_mask[:, 1:].clone()
    for row, start in enumerate(starts):
        taught[row, : start - 1] = 0
    return made.input_ids, taught


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
