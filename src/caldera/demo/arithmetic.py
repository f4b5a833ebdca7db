"""The built-in tasks, a tokenizer and a small transformer for them, and its supervised start."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from caldera.config import FSDPConfig, OptimizerConfig, RolloutConfig
from caldera.core_algos import LossScale
from caldera.data import compute_position_ids, left_pad, right_pad, tokenize_chat
from caldera.engine import EngineOptions, ForwardPlan, LocalEngine, Outputs
from caldera.models.attention import ATTENTION
from caldera.protocol import DataProto, tensors_of
from caldera.rollout.base import Request, SamplingParams
from caldera.rollout.native.engine import NativeRollout

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


PLAN = ForwardPlan(("log_probs",), by_tokens=False, micro_batch_size=1024, max_tokens=None)
CHECK_EVERY = 5
MOST_TOKENS = 64


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[tuple[str, str]],
    held_out: Sequence[tuple[str, str]],
    accuracy: float,
    max_steps: int,
    on_step: Callable[[int, float], None],
) -> float:
    """Imitate (question, answer) pairs until the model answers `accuracy` of the held-out ones.

    Stopping at an accuracy instead of at a step makes the start alike on machines that round
    differently. Returns the accuracy reached.
    """
    memory, optim = FSDPConfig(dtype="float32"), OptimizerConfig(lr=2e-3)
    engine = LocalEngine(model, torch.device("cpu"), EngineOptions(memory, optim, grad_clip=1.0))
    sampler = NativeRollout(
        RolloutConfig(dtype="float32", max_model_len=MOST_TOKENS), model, torch.device("cpu")
    )
    sampler.wake_up()
    picker = random.Random(0)
    reached = 0.0
    for step in range(1, max_steps + 1):
        batch = demonstration_batch(picker.sample(list(examples), 128), tokenizer)
        engine.train(batch, imitation_loss, PLAN)
        if step % CHECK_EVERY == 0:
            reached = greedy_accuracy(sampler, tokenizer, held_out)
            on_step(step, reached)
            if reached >= accuracy:
                break
    return reached


def imitation_loss(
    outputs: Outputs, rows: DataProto, scale: LossScale
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean negative log-likelihood of the demonstrated answer's tokens."""
    loss = scale.aggregate(-outputs["log_probs"], tensors_of(rows)["response_mask"], "token-mean")
    return loss, {"train/loss": loss.detach()}


def greedy_accuracy(
    sampler: NativeRollout, tokenizer: PreTrainedTokenizerBase, problems: Sequence[tuple[str, str]]
) -> float:
    """Share of the questions that the most likely answer answers."""
    prompts, answers = tokenize_problems(problems, tokenizer)
    stop = frozenset([tokenizer.eos_token_id])
    greedy = SamplingParams(max(map(len, answers)), temperature=0.0, stop_token_ids=stop)
    completions = sampler.generate([Request(prompt, greedy, seed=0) for prompt in prompts])
    right = [done.token_ids == answer for done, answer in zip(completions, answers, strict=True)]
    return sum(right) / len(right)


def tokenize_problems(
    problems: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and answers with the end token."""
    prompts = [tokenize_chat(tokenizer, [{"role": "user", "content": q}], {}) for q, _ in problems]
    eos = tokenizer.eos_token_id
    answers = [[*tokenizer.encode(a, add_special_tokens=False), eos] for _, a in problems]
    return prompts, answers


def demonstration_batch(
    pairs: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase
) -> DataProto:
    """Questions as left-padded prompts, answers as right-padded responses."""
    prompts, answers = tokenize_problems(pairs, tokenizer)
    prompt_width, answer_width = max(map(len, prompts)), max(map(len, answers))
    pad = tokenizer.pad_token_id
    ids = [left_pad(prompts, prompt_width, pad), right_pad(answers, answer_width, pad)]
    mask = [
        left_pad([[1] * len(row) for row in prompts], prompt_width, 0),
        right_pad([[1] * len(row) for row in answers], answer_width, 0),
    ]
    attention_mask = torch.cat(mask, dim=1)
    return DataProto.from_dict(
        {
            "input_ids": torch.cat(ids, dim=1),
            "attention_mask": attention_mask,
            "position_ids": compute_position_ids(attention_mask),
            "response_mask": mask[1],
        }
    )
