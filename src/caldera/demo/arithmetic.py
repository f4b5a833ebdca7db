"""The built-in tasks, and a tokenizer and a small transformer for the first of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from caldera.models.attention import ATTENTION

DATA_SOURCE = "caldera/arithmetic"
Problem = tuple[str, str]
"""A question and the number that answers it."""
LARGEST = 99
HELD_OUT = 512
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """A transformer of 0.4 million parameters with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    return cast(PreTrainedModel, model)


def sums(seed: int) -> tuple[list[Problem], list[Problem]]:
    """All sums of two two-digit numbers, shuffled: (for training, held out)."""
    numbers = range(LARGEST + 1)
    problems = [(f"{a:02d}+{b:02d}", str(a + b)) for a in numbers for b in numbers]
    random.Random(seed).shuffle(problems)
    return problems[HELD_OUT:], problems[:HELD_OUT]


def products() -> list[Problem]:
    """All products of two digits."""
    digits = range(10)
    return [(f"{a} times {b} is", str(a * b)) for a in digits for b in digits]


def write_parquet(
    problems: Sequence[Problem], split: str, path: Path, examples: Sequence[Problem] = ()
) -> None:
    """The problems in verl's row schema, each after the solved examples."""
    shown = [
        {"role": role, "content": text}
        for example in examples
        for role, text in zip(("user", "assistant"), example, strict=True)
    ]
    rows: list[dict[str, Any]] = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [*shown, {"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, (question, answer) in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
