"""A character tokenizer with a chat template, data configurations and data files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from caldera.config import DataConfig

CHARACTERS = "".join(chr(code) for code in range(32, 127)) + "\n"
SPECIAL_TOKENS = ["<pad>", "<eos>", "<user>", "<assistant>", "<system>", "<unk>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% if m.name is defined %}!{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ suffix }}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.add_special_tokens(SPECIAL_TOKENS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(autouse=True)
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("CALDERA_CACHE", str(root))
    return root


@pytest.fixture
def make_config() -> Callable[..., DataConfig]:
    def make(**values: Any) -> DataConfig:
        defaults: dict[str, Any] = {
            "train_files": [],
            "val_files": [],
            "seed": 7,
            "max_prompt_length": 8,
            "dataloader_num_workers": 0,
        }
        return DataConfig(**{**defaults, **values})

    return make


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
