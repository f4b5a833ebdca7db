from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from caldera.data import fitting_prompts, prompt_lengths
from caldera.errors import DataError


def prompt(text: str, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": text}]


# <user>, the characters, <assistant>
PROMPTS = [prompt("abc"), prompt("a"), prompt("abcdef")]
LENGTHS = [5, 3, 8]


def cache_files(root: Path) -> list[Path]:
    return sorted((root / "prompt_lengths").glob("*"))


class Counter:
    """A progress display that counts what passes."""

    def __init__(self) -> None:
        self.seen = 0
        self.total = 0

    def __call__(self, items: Iterable[int], total: int, description: str) -> Iterable[int]:
        self.total += total
        for item in items:
            self.seen += 1
            yield item


@pytest.mark.parametrize("workers", [1, 2])
def test_lengths_are_measured_once(
    tokenizer: PreTrainedTokenizerFast, cache_root: Path, workers: int
) -> None:
    counter = Counter()
    for _ in range(2):
        lengths = prompt_lengths(
            PROMPTS, tokenizer, template_kwargs={}, workers=workers, progress=counter
        )
        assert lengths == LENGTHS
    assert (counter.seen, counter.total) == (3, 3)
    assert len(cache_files(cache_root)) == 1


def test_what_decides_the_lengths_decides_the_cache_file(
    tokenizer: PreTrainedTokenizerFast, cache_root: Path
) -> None:
    def measure(**kwargs: Any) -> list[int]:
        return prompt_lengths(PROMPTS, tokenizer, template_kwargs=kwargs)

    assert measure() == LENGTHS
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)  # leaves settings behind
    assert measure() == LENGTHS
    assert len(cache_files(cache_root)) == 1
    assert measure(suffix="xy") == [7, 5, 10]
    assert prompt_lengths(PROMPTS[:2], tokenizer, template_kwargs={}) == [5, 3]
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert measure() == [3, 1, 6]
    tokenizer.add_tokens(["abc"])
    assert measure() == [1, 1, 4]
    assert len(cache_files(cache_root)) == 5


@pytest.mark.parametrize("content", ["{", "[1, 2]", '{"a": 1}', '[1, 2, "3"]', "[1, 2, -7]"])
def test_a_corrupt_cache_file_is_measured_anew(
    tokenizer: PreTrainedTokenizerFast,
    cache_root: Path,
    caplog: pytest.LogCaptureFixture,
    content: str,
) -> None:
    prompt_lengths(PROMPTS, tokenizer, template_kwargs={})
    (file,) = cache_files(cache_root)
    file.write_text(content)
    assert prompt_lengths(PROMPTS, tokenizer, template_kwargs={}) == LENGTHS
    assert f"ignoring the prompt lengths in {file}" in caplog.text
    assert file.read_text() == "[5, 3, 8]"


def test_a_cache_that_cannot_be_written_costs_a_warning(
    tokenizer: PreTrainedTokenizerFast, cache_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache_root.write_text("a file where the folder should be")
    assert prompt_lengths(PROMPTS, tokenizer, template_kwargs={}) == LENGTHS
    assert "cannot cache prompt lengths" in caplog.text


def test_long_prompts_are_dropped_and_counted(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="caldera"):
        assert fitting_prompts(PROMPTS, tokenizer, max_length=5, template_kwargs={}) == [0, 1]
    assert "kept 2 of 3 prompts; dropped 1 of more than data.max_prompt_length=5" in caplog.text


def test_a_prompt_that_the_template_refuses_is_dropped_with_its_reason(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [prompt("a"), prompt("b", role="forbidden"), prompt("c")]
    for _ in range(2):  # measured, then cached
        caplog.clear()
        assert fitting_prompts(prompts, tokenizer, max_length=5, template_kwargs={}) == [0, 2]
        assert "dropped 1 prompts; the first: " in caplog.text
        assert "no such role" in caplog.text


def test_dropping_everything_is_an_error_with_the_numbers(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with pytest.raises(
        DataError,
        match=r"dropped all 3 prompts: they have 3 to 8 tokens, and data.max_prompt_length is 2",
    ):
        fitting_prompts(PROMPTS, tokenizer, max_length=2, template_kwargs={})
    with pytest.raises(DataError, match="the chat template failed on each of them"):
        fitting_prompts(
            [prompt("b", role="forbidden")], tokenizer, max_length=2, template_kwargs={}
        )
