"""Models whose layers or heads do something that packed tokens would get wrong."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    Lfm2Config,
    PreTrainedConfig,
    PreTrainedModel,
)

from caldera.engine.packed_model import PackedModel
from caldera.errors import UnsupportedError
from caldera.models.attention import ATTENTION
from caldera.models.forward import language_head

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def build(config: PreTrainedConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)


def test_layers_with_a_state_of_their_own_are_refused() -> None:
    module = build(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]))
    with pytest.raises(
        UnsupportedError, match=r"^Lfm2ForCausalLM has layers of the type conv; takes"
    ):
        PackedModel(module)


def test_scaled_logits_are_refused() -> None:
    assert language_head(build(GraniteConfig(**SIZES, logits_scaling=1.0))).shape == (50, 32)
    with pytest.raises(UnsupportedError, match="GraniteForCausalLM needs logits_scaling"):
        language_head(build(GraniteConfig(**SIZES, logits_scaling=8.0)))
