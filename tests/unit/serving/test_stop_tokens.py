"""Where the answers of a server elsewhere end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from caldera.config import ModelConfig
from caldera.workers.building import stop_tokens
from caldera.workers.sampler import load_sampled


@pytest.mark.parametrize("sampler", ["remote", "native"])
def test_stop_tokens_of_the_folder(
    sampler: str, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    """Without its weights a model ends where it ends with them."""
    module = tiny_model(eos_token_id=2)
    module.generation_config = GenerationConfig(eos_token_id=[2, 3])
    module.save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    assert stop_tokens(load_sampled(model, sampler, "float32", 0), 1) == {1, 2, 3}
    (tmp_path / "generation_config.json").unlink()
    assert stop_tokens(load_sampled(model, sampler, "float32", 0), 1) == {1, 2}
