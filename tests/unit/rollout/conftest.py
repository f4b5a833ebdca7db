from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from caldera.config import RolloutConfig
from caldera.models.attention import ATTENTION
from caldera.rollout import Request, SamplingParams

BuildModel = Callable[..., PreTrainedModel]
MakeConfig = Callable[..., RolloutConfig]
MakeRequests = Callable[..., list[Request]]

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # large enough for distributions that are not flat
}
WINDOW: dict[str, Any] = {"sliding_window": 7}
GEMMA: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 8,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, Callable[[], tuple[type[PreTrainedModel], Any]]] = {
    "llama": lambda: (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen2": lambda: (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: (Qwen3ForCausalLM, Qwen3Config(**SIZES)),
    "mistral": lambda: (MistralForCausalLM, MistralConfig(**SIZES, **WINDOW)),
    "gemma3": lambda: (Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, **WINDOW, **GEMMA)),
}


@pytest.fixture(scope="session")
def build_model() -> BuildModel:
    """A tiny random model of a family, the same for the same seed."""

    def build(family: str = "llama", seed: int = 0, attention: str = ATTENTION) -> PreTrainedModel:
        kind, config = FAMILIES[family]()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return kind._from_config(config, attn_implementation=attention)

    return build


@pytest.fixture(scope="session")
def llama(build_model: BuildModel) -> PreTrainedModel:
    return build_model("llama")


@pytest.fixture
def adapted(build_model: Any) -> Any:
    """A model with an adapter of rank 3 on two kinds of layers."""
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "up_proj"])
    return peft.get_peft_model(build_model("llama"), lora)


@pytest.fixture
def config() -> MakeConfig:
    """A config with some keys set."""

    def make(**keys: Any) -> RolloutConfig:
        return RolloutConfig(**{"prompt_length": 64, "response_length": 64, **keys})

    return make


@pytest.fixture
def make_requests() -> MakeRequests:
    """Random prompts of the given lengths, the same for the same lengths."""

    def make(lengths: list[int], **params: Any) -> list[Request]:
        generator = torch.Generator().manual_seed(5)
        chosen = SamplingParams(**{"max_tokens": 12, **params})
        return [
            Request(torch.randint(1, 48, (length,), generator=generator).tolist(), chosen, seed)
            for seed, length in enumerate(lengths)
        ]

    return make
