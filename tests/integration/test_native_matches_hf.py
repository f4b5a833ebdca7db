"""A real pretrained model: the native sampler against transformers and against packed training."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from caldera.config import RolloutConfig
from caldera.demo import smollm2
from caldera.models.attention import ATTENTION, PackedSequences
from caldera.models.forward import hidden_states, language_logits
from caldera.rollout import Completion, HFRollout, NativeRollout, Request, SamplingParams

needed = [smollm2.PACKAGE, "gguf"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not smollm2.default_folder().is_dir() and not all(map(importlib.util.find_spec, needed)),
        reason=f"SmolLM2 is not installed: {smollm2.INSTALL}",
    ),
]

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 12 + 30?",
    "Name three colours.",
    "Who wrote Hamlet? Answer in one short sentence.",
    "List the first five even numbers, separated by commas.",
    "Explain in simple words why the sky is blue.",
    "Hi!",
]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2.materialise()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=ATTENTION
    )


@pytest.fixture(scope="module")
def requests(tokenizer: PreTrainedTokenizerBase) -> list[Request]:
    params = SamplingParams(32, temperature=0.0, stop_token_ids=frozenset({tokenizer.eos_token_id}))
    prompts: list[Any] = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    return [Request(prompt, params, seed) for seed, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def completions(model: PreTrainedModel, requests: list[Request]) -> list[Completion]:
    return NativeRollout(config(), model, CPU).generate(requests)


def config() -> RolloutConfig:
    return RolloutConfig(prompt_length=128, response_length=64, dtype="float32")


def test_tokenizer_takes_digits_one_by_one(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("a 1234") == ["a", "Ġ", "1", "2", "3", "4"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")


def test_answers_make_sense(
    tokenizer: PreTrainedTokenizerBase, completions: list[Completion]
) -> None:
    assert "Paris" in tokenizer.decode(completions[0].token_ids)
    assert completions[0].finish_reason == "stop"
    assert completions[0].token_ids[-1] == tokenizer.eos_token_id


def test_greedy_is_that_of_transformers(
    model: PreTrainedModel, requests: list[Request], completions: list[Completion]
) -> None:
    expected = HFRollout(config(), model, CPU).generate(requests)
    for ours, theirs in zip(completions, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)


def test_log_probs_are_those_of_a_packed_forward(
    model: PreTrainedModel, requests: list[Request], completions: list[Completion]
) -> None:
    pairs = list(zip(requests, completions, strict=True))
    sequences = [[*r.prompt_ids, *c.token_ids] for r, c in pairs]
    packed = PackedSequences([len(sequence) for sequence in sequences], CPU)
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    with torch.no_grad():
        hidden = hidden_states(model, tokens[None], packed.position_ids, packed)
        log_probs = language_logits(model, hidden).log_softmax(-1)
    start = 0
    for request, completion in pairs:
        first = start + len(request.prompt_ids)
        chosen = torch.tensor(completion.token_ids)
        expected = log_probs[first - 1 : first - 1 + len(chosen)].gather(1, chosen[:, None])[:, 0]
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-4)
        start = first + len(chosen)
