"""Tiny models of several families, and folders that hold them with a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large enough for distributions that are not flat
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Starcoder2 normalises in its own precision, where the others go through float32: in float64 it
# shows differences that they would round away.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "starcoder2": {"sliding_window": None, "residual_dropout": 0.0, "embedding_dropout": 0.0},
}


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """A random model of a family, the same for the same seed."""

    def build(family: str = "llama", seed: int = 0, **overrides: Any) -> PreTrainedModel:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from caldera.models.attention import ATTENTION

        kind = family.partition("-")[0]
        config = AutoConfig.for_model(kind, **{**SIZES, **FAMILIES[family], **overrides})
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
        return model.eval()

    return build


@pytest.fixture(scope="session")
def model_folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., PreTrainedModel]
) -> Callable[..., str]:
    """The folder of a tiny model with a tokenizer of one token a letter; not to be written to."""
    made: dict[str, str] = {}

    def folder(family: str = "llama") -> str:
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            tiny_model(family).save_pretrained(path)
            _save_tokenizer(path)
            made[family] = str(path)
        return made[family]

    return folder


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<bos>", "<eos>", *(chr(ord("A") + i) for i in range(45))]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
