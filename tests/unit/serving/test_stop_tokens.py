"""Where the responses of a remote server end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from caldera.config import ModelConfig
from caldera.rollout import SamplingParams
from caldera.serving import ChatModel
from caldera.serving.reading import _params
from caldera.workers.building import stop_tokens
from caldera.workers.generation import load_sampled


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


def test_stops_of_the_model_and_of_a_request_both_end_an_answer() -> None:
    usual = SamplingParams(1, min_p=0.2, presence_penalty=0.3, stop=("END",))
    none: Any = None  # no text is read here
    model = ChatModel(
        name="m", tokenizer=none, vocabulary=9, stop_tokens=frozenset({2}), prompt_length=4,
        response_length=4, max_length=8, sampling=usual,
    )  # fmt: skip
    plain = _params({}, [1], model, 0)
    assert (plain.stop, plain.min_p, plain.presence_penalty) == (("END",), 0.2, 0.3)
    fields = {"stop": ["x", "END"], "stop_token_ids": [5], "presence_penalty": 0}
    asked = _params(fields, [1], model, 0)
    assert (asked.stop, asked.stop_token_ids) == (("END", "x"), frozenset({2, 5}))
    assert asked.presence_penalty == 0
