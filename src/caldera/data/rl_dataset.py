"""The prompts of a reinforcement learning run."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track
from torch.utils.data import Dataset

from caldera.data.chat import (
    Message,
    has_chat_template,
    prompt_messages,
    render_chat,
    require_chat_template,
    tokenize_bare,
    tokenize_chat,
    tokenize_text,
)
from caldera.data.files import Row, Rows, RowTable, read_rows
from caldera.data.loader import compute_position_ids, left_pad, seeded_permutation, truncate
from caldera.data.plain_rows import completed
from caldera.errors import DataError, UnsupportedError
from caldera.storage import cache_folder
from caldera.storage.writing import write_text_atomic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from caldera.config import DataConfig


logger = logging.getLogger(__name__)

Progress = Callable[[Iterable[int], int, str], Iterable[int]]
Prompt = list[Message] | str
"""A chat, or bare text, which no template touches."""

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
        if isinstance(prompt, str):
            return len(tokenize_bare(self.tokenizer, prompt))
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
    assert not isinstance(prompt, str), "bare text has no template to fail"
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
        write_text_atomic(file, [json.dumps(lengths)])
    except OSError as error:
        logger.warning("cannot cache prompt lengths in %s: %s", file, error)


class RLHFDataset(Dataset[Row]):
    """Rows of data files, each with the tokens of its prompt.

    An item is the row itself plus

    - `input_ids`, `attention_mask`, `position_ids`: (P,) int64, left-padded to
      P = `data.max_prompt_length`
    - `raw_prompt_ids`: the same tokens as a list, without padding
    - `raw_prompt`: the chat messages, if `data.return_raw_chat`
    - `full_prompts`: the text of the templated chat, if `data.return_full_prompt`
    - `index`, `tools_kwargs`, `interaction_kwargs`: from the row's `extra_info`

    Subclasses may override `_read_files_and_tokenize`, `maybe_filter_out_long_prompts`,
    `_build_messages`, `__getitem__` and `__len__`.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        processor: object | None = None,
        max_samples: int = -1,
    ) -> None:
        if processor is not None:
            raise UnsupportedError("RLHFDataset takes text only; it has no use for a processor")
        self.tokenizer = tokenizer
        self.processor = None
        self.config = config
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.prompt_key = config.prompt_key
        self.max_prompt_length = config.max_prompt_length
        self.max_samples = max_samples
        template = config.apply_chat_template_kwargs
        if config.apply_chat_template:
            require_chat_template(tokenizer, template)
        has_template = has_chat_template(tokenizer, template)
        self._is_bare = config.apply_chat_template is False or not has_template
        self._key = _files_key(self.data_files, config)
        self._table: RowTable | None = None
        self._fitting: Any = None
        self.dataframe: Any = None
        """The rows, which hooks may change; see `Rows`."""
        self._rows_of: tuple[Any, Rows] | None = None
        self._read_files_and_tokenize()
        self._check_own_rows()
        for position in range(len(self._rows)):
            self._messages(self._example(position), position)

    # ------------------------------------------------------------------ hooks

    def _read_files_and_tokenize(self) -> None:
        """Fill `self.dataframe` with the rows that are part of the data set, in order."""
        required = {} if self._builds_messages else {self.prompt_key: "data.prompt_key"}
        table = read_rows(self.data_files, key=self._key, required=required)
        self._table = completed(table, self.prompt_key, self.config.reward_fn_key)
        rows = Rows.of_table(self._table)
        self.dataframe = rows.select(self._select(len(rows)))
        self._filter()

    def _build_messages(self, example: Row) -> Any:
        """The chat messages of a row, which may be changed: it is a copy. Bare text stays text."""
        prompt = example.get(self.prompt_key)
        if isinstance(prompt, str) and prompt.strip() and not self._is_bare:
            return [{"role": "user", "content": prompt}]
        return prompt

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """The rows whose prompts fit, if `data.filter_overlong_prompts` asks for that."""
        config = self.config
        if not config.filter_overlong_prompts:
            return dataframe
        rows = Rows.of(dataframe, self._hook)
        chats = [self._messages(self._example(i, rows), i, rows) for i in range(len(rows))]
        prompts = [chat[0]["content"] if self._is_bare else chat for chat in chats]
        kept = fitting_prompts(
            prompts,
            self.tokenizer,
            max_length=config.max_prompt_length,
            template_kwargs=config.apply_chat_template_kwargs,
            workers=config.filter_overlong_prompts_workers,
        )
        return rows.select(kept)

    # ------------------------------------------------------------------ rows

    @property
    def _rows(self) -> Rows:
        """Those of `self.dataframe`, whatever stands there by now."""
        if self._rows_of is None or self._rows_of[0] is not self.dataframe:
            self._rows_of = (self.dataframe, Rows.of(self.dataframe, self._hook))
        return self._rows_of[1]

    @property
    def _hook(self) -> str:
        return f"{type(self).__name__}._read_files_and_tokenize"

    @property
    def _builds_messages(self) -> bool:
        """Whether a subclass makes the messages, of whatever columns."""
        return type(self)._build_messages is not RLHFDataset._build_messages

    def _filter(self) -> None:
        self.dataframe = self._fitting = self.maybe_filter_out_long_prompts(self.dataframe)
        if self.dataframe is None:
            raise DataError(
                f"{type(self).__name__}.maybe_filter_out_long_prompts returned None: it must "
                "return the rows that are kept"
            )

    def _check_own_rows(self) -> None:
        """Rows that a hook put there instead of ours are filtered as those are."""
        if self.dataframe is None:
            raise DataError(
                f"{self._hook} left self.dataframe at None: it must put the rows there, or call "
                "super()._read_files_and_tokenize()"
            )
        if self._table is None and 0 < self.max_samples < len(self._rows):
            logger.warning(
                "%s has %d rows, more than the %d that data.train_max_samples or "
                "data.val_max_samples asks for: it does not call super(), so it must choose them "
                "itself, by self.max_samples",
                self._hook,
                len(self._rows),
                self.max_samples,
            )
        if self.dataframe is not self._fitting:
            self._filter()
        if not len(self._rows):
            raise DataError(f"{self._key}: {self._hook} left no rows")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> Row:
        # A caller may change its row, and the next epoch must not see that.
        fields = copy.deepcopy(self._rows[item])
        messages = self._messages(fields, item)
        fields |= self._prompt_fields(messages, item)
        extra_info = self._extra_info(fields, item)
        index = extra_info.get("index")
        fields["index"] = 0 if index is None else index
        fields["tools_kwargs"] = self._tools_kwargs(extra_info, item)
        fields["interaction_kwargs"] = extra_info.get("interaction_kwargs") or {}
        return fields

    def column_values(self, name: str) -> set[Any]:
        """The different values of a column, None among them if a row has none."""
        return {row.get(name) for row in self._rows}

    def located_rows(self) -> Iterator[tuple[str, Row]]:
        """Each row, not to be changed, and where it comes from."""
        return ((self._rows.where(i), row) for i, row in enumerate(self._rows))

    def require_column(self, name: str, role: str, remedy: str) -> None:
        """Raise DataError unless every file has the column, which has this role."""
        if self._table is not None:
            self._table.require_column(name, self._key, role, remedy)

    def has_column(self, name: str) -> bool:
        """Whether a file has the column."""
        return self._table is None or any(name in columns for columns in self._table.columns)

    def first_rows(self, column: str) -> dict[str, dict[Any, Row]]:
        """By file, which is named with its key: the first row of each value of a column."""
        found: dict[str, dict[Any, Row]] = {}
        for position, row in enumerate(self._rows):
            file = f"{self._key}: {self._rows.file_of(position)}"
            found.setdefault(file, {}).setdefault(row.get(column), row)
        return found

    def check_prompts(self) -> None:
        """Raise DataError for the longest prompt, by characters, if a run could not use it, and for
        a row whose `extra_info` is no dict: it may else come up hours later."""
        characters = []
        for position, row in enumerate(self._rows):
            self._extra_info(row, position)
            messages = self._messages(self._example(position), position)
            characters.append(sum(len(str(message.get("content"))) for message in messages))
        longest = characters.index(max(characters))
        self._prompt_fields(self._messages(self._example(longest), longest), longest)

    def _extra_info(self, row: Row, position: int) -> dict[str, Any]:
        extra_info = row.get("extra_info") or {}
        if not isinstance(extra_info, dict):
            kind = type(extra_info).__name__
            where = self._rows.where(position)
            raise DataError(f"{where}: extra_info must be a dict, not a {kind}")
        return extra_info

    def _select(self, total: int) -> list[int]:
        most = self.max_samples
        if not 0 < most < total:
            return list(range(total))
        logger.info("using %d of %d rows", most, total)
        if not self.config.shuffle:
            return list(range(most))
        assert self.config.seed is not None, "loading a configuration settles its seeds"
        return seeded_permutation(total, self.config.seed)[:most]

    def _example(self, position: int, rows: Rows | None = None) -> Row:
        """A row for `_build_messages`, copied where a subclass may change it."""
        row = (rows or self._rows)[position]
        return copy.deepcopy(row) if self._builds_messages else row

    def _messages(self, example: Row, position: int, rows: Rows | None = None) -> list[Message]:
        where = (rows or self._rows).where(position)
        what = f"the value of {self.prompt_key!r} (data.prompt_key)"
        if self._builds_messages:
            what = f"what {type(self).__name__}._build_messages returned"
        value = self._build_messages(example)
        if self._is_bare and not isinstance(value, str):
            if self.config.apply_chat_template is None:
                require_chat_template(self.tokenizer, self.config.apply_chat_template_kwargs)
            raise DataError(
                f"{where}: {what} must be plain text with data.apply_chat_template=False; got a "
                f"{type(value).__name__}"
            )
        return prompt_messages(value, f"{where}: {what}")

    def _prompt_fields(self, messages: list[Message], row: int) -> Row:
        config = self.config
        text, ids = self._rendered(messages, row)
        if len(ids) > config.max_prompt_length and config.truncation == "error":
            raise DataError(
                f"{self._rows.where(row)}: the prompt has {len(ids)} tokens, more than "
                f"data.max_prompt_length={config.max_prompt_length}; raise that, drop such rows "
                "with data.filter_overlong_prompts=true, or cut them with "
                "data.truncation=left, right or middle"
            )
        ids = truncate(ids, config.max_prompt_length, config.truncation)
        pad_id = self.tokenizer.pad_token_id
        assert isinstance(pad_id, int)
        input_ids = left_pad([ids], config.max_prompt_length, pad_id)[0]  # (P,)
        attention_mask = left_pad([[1] * len(ids)], config.max_prompt_length, 0)[0]  # (P,)
        fields: Row = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": compute_position_ids(attention_mask),
            "raw_prompt_ids": ids,
        }
        if config.return_raw_chat:
            fields["raw_prompt"] = messages
        if config.return_full_prompt:
            fields["full_prompts"] = text
        return fields

    def _rendered(self, messages: list[Message], row: int) -> tuple[str, list[int]]:
        """The text of a prompt, and its tokens."""
        if self._is_bare:
            text = str(messages[0]["content"])
            return text, tokenize_bare(self.tokenizer, text)
        try:
            text = render_chat(self.tokenizer, messages, self.config.apply_chat_template_kwargs)
        except DataError as error:
            raise DataError(f"{self._rows.where(row)}: {error}") from error
        return text, tokenize_text(self.tokenizer, text)

    def _tools_kwargs(self, extra_info: dict[str, Any], row: int) -> dict[str, Any]:
        # In a parquet file, every tool of any row is a field of all rows, None where not given.
        given = extra_info.get("tools_kwargs") or {}
        tools_kwargs = {tool: kwargs for tool, kwargs in given.items() if kwargs is not None}
        if extra_info.get("need_tools_kwargs") and not tools_kwargs:
            logger.warning(
                "%s: extra_info asks for tools_kwargs and has none", self._rows.where(row)
            )
        return tools_kwargs


def _files_key(files: Sequence[str], config: DataConfig) -> str:
    return "data.train_files" if list(files) == list(config.train_files) else "data.val_files"
