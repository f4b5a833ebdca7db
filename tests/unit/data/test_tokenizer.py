from __future__ import annotations

import logging
from pathlib import Path

import huggingface_hub.constants
import pytest
from transformers import PreTrainedTokenizerFast

from caldera.data import hf_tokenizer
from caldera.errors import DataError


def test_a_saved_tokenizer_comes_back(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "t")
    loaded = hf_tokenizer(str(tmp_path / "t"))
    assert loaded.encode("abc") == tokenizer.encode("abc")
    assert loaded.pad_token == "<pad>"
    assert loaded.chat_template == tokenizer.chat_template
    custom = hf_tokenizer(str(tmp_path / "t"), custom_chat_template="{{ messages[0].content }}")
    assert custom.chat_template == "{{ messages[0].content }}"


def test_the_end_token_pads_where_there_is_no_padding_token(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "t")
    with caplog.at_level(logging.WARNING, logger="caldera"):
        loaded = hf_tokenizer(str(tmp_path / "t"))
        hf_tokenizer(str(tmp_path / "t"))
    assert loaded.pad_token_id == loaded.eos_token_id == 1
    assert [r.message for r in caplog.records if "has no padding token" in r.message] == [
        f"tokenizer {str(tmp_path / 't')!r} has no padding token; padding with <eos>"
    ]


def test_neither_padding_nor_end_token(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.pad_token = None
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "t")
    with pytest.raises(DataError, match="neither a padding nor an end-of-text token"):
        hf_tokenizer(str(tmp_path / "t"))


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"the folder {tmp_path / 'no'} does not exist"):
        hf_tokenizer(str(tmp_path / "no"))


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"tried the folder {tmp_path}: "):
        hf_tokenizer(str(tmp_path))


def test_a_hub_name_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError) as caught:
        hf_tokenizer("nobody/no-such-model")
    message = str(caught.value)
    assert "tokenizer='nobody/no-such-model'" in message
    assert "nobody/no-such-model (which does not exist) and the Hugging Face hub" in message
