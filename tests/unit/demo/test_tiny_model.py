"""The model for first runs, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from caldera.data import hf_tokenizer
from caldera.demo import run, tiny_model


def test_it_is_made_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_WARM_START_STEPS", 1)
    folder = tmp_path / "models/tiny"
    assert tiny_model(folder) == folder
    last = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert last.name == "tokenizer.json", "a folder that has it is complete"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(weights.numel() for weights in model.parameters()) < 500_000
    tokenizer = hf_tokenizer(str(folder))
    asked = [{"role": "user", "content": "12+34"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text == "<bos>12+34="
    before = last.stat().st_mtime_ns
    assert tiny_model(str(folder)) == folder
    assert last.stat().st_mtime_ns == before
