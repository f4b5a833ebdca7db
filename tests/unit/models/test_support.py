"""Models that cannot be loaded with attention of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoConfig

from caldera.errors import UnsupportedError
from caldera.models.pretrained import Recipe, load_empty, load_whole


@pytest.mark.parametrize("load", [load_whole, load_empty])
def test_a_model_with_kinds_of_attention_of_its_own(load: object, tmp_path: Path) -> None:
    config = GPTNeoConfig(
        vocab_size=48, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]]
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    recipe = Recipe(AutoModelForCausalLM, str(tmp_path), config, torch.float32, 0, False)
    with pytest.raises(UnsupportedError, match="gpt_neo do not use the attention interface"):
        load(recipe)  # type: ignore[operator]
