"""A tokenizer with one token a character, and batches of its texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from caldera.protocol import DataProto

PROMPT_LENGTH, RESPONSE_LENGTH = 4, 3
ALPHABET = "0123456789+=-"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; 0 pads and 1 ends."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {c: i for i, c in enumerate(ALPHABET, start=2)}
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    characters.decoder = decoders.Fuse()  # no spaces between tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>"
    )


def build_data(
    rows: list[tuple[str, str, Any]],
    data_source: str | list[str] = "caldera/arithmetic",
    **columns: list[Any],
) -> DataProto:
    """Rows of (prompt, response, ground truth)."""
    ids = {character: i for i, character in enumerate(ALPHABET, start=2)} | {"$": 1}
    # Padding that would be read as a digit, if the attention mask were not heeded.
    prompts = torch.full((len(rows), PROMPT_LENGTH), ids["9"])
    responses = torch.full((len(rows), RESPONSE_LENGTH), ids["9"])
    attention_mask = torch.zeros(len(rows), PROMPT_LENGTH + RESPONSE_LENGTH, dtype=torch.int64)
    for row, (prompt, response, _) in enumerate(rows):
        start, length = PROMPT_LENGTH - len(prompt), len(response)
        prompts[row, start:] = torch.tensor([ids[c] for c in prompt])
        responses[row, :length] = torch.tensor([ids[c] for c in response], dtype=torch.int64)
        attention_mask[row, start : PROMPT_LENGTH + length] = 1
    sources = [data_source] * len(rows) if isinstance(data_source, str) else data_source
    non_tensors: dict[str, list[Any]] = {
        "data_source": sources,
        "reward_model": [{"style": "rule", "ground_truth": truth} for *_, truth in rows],
        **columns,
    }
    return DataProto.from_dict(
        tensors={"prompts": prompts, "responses": responses, "attention_mask": attention_mask},
        non_tensors=non_tensors,
    )


@pytest.fixture
def make_data() -> Callable[..., DataProto]:
    return build_data
