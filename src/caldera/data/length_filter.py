"""The filter of prompts that are too long, with prompt lengths cached on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track

from caldera.data.chat import Message, render_chat, tokenize_chat
from caldera.errors import DataError
from caldera.storage import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Progress = Callable[[Iterable[int], int, str], Iterable[int]]
Prompt = list[Message]

FAILED = -1
"""The length of a prompt that the chat template cannot render."""


def fitting_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    template_kwargs: Mapping[str, Any],
    workers: int = 1,
    progress: Progress | None = None,
    key: str = "data.max_prompt_length",
) -> list[int]:
    """The positions of the prompts of at most `max_length` tokens; what is dropped is logged.

    `key` is the setting that `max_length` came from, for messages.
    """
    lengths = prompt_lengths(
        prompts, tokenizer, template_kwargs=template_kwargs, workers=workers, progress=progress
    )
    kept = [i for i, length in enumerate(lengths) if length != FAILED and length <= max_length]
    if failed := [i for i, length in enumerate(lengths) if length == FAILED]:
        reason = _failure(prompts[failed[0]], tokenizer, template_kwargs)
        logger.warning("dropped %d prompts; the first: %s", len(failed), reason)
    if not kept:
        measured = [length for length in lengths if length != FAILED]
        detail = (
            f"they have {min(measured)} to {max(measured)} tokens"
            if measured
            else "the chat template failed on each of them"
        )
        raise DataError(
            f"the length filter dropped all {len(prompts)} prompts: {detail}, "
            f"and {key} is {max_length}"
        )
    logger.info(
        "kept %d of %d prompts; dropped %d of more than %s=%d tokens",
        len(kept),
        len(prompts),
        len(prompts) - len(kept) - len(failed),
        key,
        max_length,
    )
    return kept


def prompt_lengths(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    template_kwargs: Mapping[str, Any],
    workers: int = 1,
    progress: Progress | None = None,
) -> list[int]:
    """The number of tokens of each prompt, or FAILED; measured once, then read from the cache."""
    key = _cache_key(prompts, tokenizer, template_kwargs)
    cache_file = cache_folder() / "prompt_lengths" / f"{key}.json"
    cached = _read_cache(cache_file, len(prompts))
    if cached is not None:
        return cached
    measured = _measure(prompts, _Meter(tokenizer, template_kwargs), workers)
    show = progress or _terminal_progress
    lengths = list(show(measured, len(prompts), "measuring prompts"))
    _write_cache(cache_file, lengths)
    return lengths


class _Meter:
    """Prompt -> number of tokens."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs

    def __call__(self, prompt: Prompt) -> int:
        try:
            return len(tokenize_chat(self.tokenizer, prompt, self.template_kwargs))
        except DataError:
            return FAILED


def _measure(prompts: Sequence[Prompt], meter: _Meter, workers: int) -> Iterator[int]:
    workers = min(workers, len(prompts))
    if workers <= 1:
        yield from map(meter, prompts)
        return
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(meter,)) as pool:
        chunksize = max(1, min(256, len(prompts) // (4 * workers)))
        yield from pool.map(_length_in_worker, prompts, chunksize=chunksize)


# Set in each worker process: sent with every task instead, the tokenizer would cost more than
# the measuring.
_worker_meter: _Meter | None = None


def _start_worker(meter: _Meter) -> None:
    global _worker_meter
    _worker_meter = meter


def _length_in_worker(prompt: Prompt) -> int:
    assert _worker_meter is not None
    return _worker_meter(prompt)


def _failure(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> str:
    try:
        render_chat(tokenizer, prompt, template_kwargs)
    except DataError as error:
        return str(error)
    raise AssertionError("a prompt that failed to render once renders now")


def _terminal_progress(items: Iterable[int], total: int, description: str) -> Iterable[int]:
    console = Console(stderr=True)
    return track(items, description, total=total, console=console, disable=not console.is_terminal)


def _cache_key(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
) -> str:
    digest = hashlib.sha256()
    for part in (_fingerprint(tokenizer), dict(template_kwargs), *prompts):
        digest.update(json.dumps(part, default=repr).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Everything that decides how a tokenizer renders and splits a chat."""
    if tokenizer.is_fast:
        model = json.loads(tokenizer.backend_tokenizer.to_str())
        # Settings of the latest call, which say nothing about the next one.
        model.pop("padding", None)
        model.pop("truncation", None)
    else:
        model = [type(tokenizer).__qualname__, sorted(tokenizer.get_vocab().items())]
    return [model, tokenizer.chat_template, tokenizer.special_tokens_map]


def _read_cache(file: Path, count: int) -> list[int] | None:
    if not file.exists():
        return None
    try:
        lengths = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        logger.warning("ignoring the prompt lengths in %s: %s", file, error)
        return None
    if (
        not isinstance(lengths, list)
        or len(lengths) != count
        or not all(type(length) is int and length >= FAILED for length in lengths)
    ):
        logger.warning("ignoring the prompt lengths in %s: not %d lengths", file, count)
        return None
    return lengths


def _write_cache(file: Path, lengths: list[int]) -> None:
    """Keep the lengths for the next run; a folder that cannot be written costs only a warning."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=file.parent, prefix=file.stem[:8], delete=False
        ) as aside:
            json.dump(lengths, aside)
        os.replace(aside.name, file)
    except OSError as error:
        logger.warning("cannot cache prompt lengths in %s: %s", file, error)
