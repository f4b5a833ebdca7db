"""Data sets of supervised training: a prompt and a response, or conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import Dataset

from caldera.data.chat import (
    Message,
    chat_messages,
    render_chat,
    require_chat_template,
    require_end_token,
    tokenize_text,
)
from caldera.data.conversation import (
    ASSISTANT,
    ConversationMismatch,
    ConversationTokenizer,
    TokenRow,
)
from caldera.data.files import Row, RowTable, read_rows
from caldera.data.loader import Batch, compute_position_ids, right_pad, truncate
from caldera.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from caldera.config import SFTDataConfig


TEMPLATE_KEY = "data.chat_template"


class TableDataset(Dataset[Row]):
    """The rows of the files of a supervised run. A subclass says which columns they must have, and
    checks each row, so that a mistake is reported before the first step."""

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: SFTDataConfig,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        require_chat_template(tokenizer, config.apply_chat_template_kwargs, TEMPLATE_KEY)
        key = files_key(parquet_files, config)
        self._table: RowTable = read_rows(parquet_files, key=key, required=self._required())
        for row in range(len(self._table.rows)):
            self._check(row)

    def _required(self) -> dict[str, str]:
        """Columns, and the keys that name them."""
        raise NotImplementedError

    def _check(self, row: int) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._table.rows)


class SFTDataset(TableDataset):
    """One row a sample: a user's message in the chat template, and the response that is trained.

    - `input_ids`, `attention_mask`, `position_ids` (L,)
    - `loss_mask` (L,): 1 where the next token is trained, so the last one is 0

    With `data.pad_mode=right` they are padded to `data.max_length`.
    """

    def _required(self) -> dict[str, str]:
        require_end_token(self.tokenizer)
        config = self.config
        self._columns = {
            "data.prompt_key": (config.prompt_key, config.prompt_dict_keys),
            "data.response_key": (config.response_key, config.response_dict_keys),
        }
        return {column: key for key, (column, _) in self._columns.items()}

    def _check(self, row: int) -> None:
        self._texts(row)

    def __getitem__(self, item: int) -> Row:
        prompt, response = self._texts(item)
        messages = [{"role": "user", "content": prompt}]
        where = self._table.where(item)
        try:
            text = render_chat(self.tokenizer, messages, self.config.apply_chat_template_kwargs)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        asked = tokenize_text(self.tokenizer, text)
        said = tokenize_text(self.tokenizer, f"{response}{self.tokenizer.eos_token}")
        row = TokenRow(asked + said, [False] * len(asked) + [True] * len(said))
        return row_fields(row, self.config, self.tokenizer, where)

    def _texts(self, row: int) -> list[str]:
        """The prompt and the answer."""
        return [self._text(row, key, *place) for key, place in self._columns.items()]

    def _text(self, row: int, key: str, column: str, path: list[str] | None) -> str:
        value = self._table.rows[row][column]
        what = f"{self._table.where(row)}: the value of {column!r} ({key})"
        path_key = key.replace("_key", "_dict_keys")
        for name in path or ():
            if not isinstance(value, dict) or name not in value:
                there = ", ".join(value) if isinstance(value, dict) else type(value).__name__
                raise DataError(f"{what} has no {name!r} ({path_key}={path}); it holds: {there}")
            value = value[name]
        if not isinstance(value, str):
            hint = ""
            if isinstance(value, dict):
                hint = f"; {path_key}=[...] names one of {', '.join(value)}"
            elif isinstance(value, list):
                hint = "; rows of whole conversations need data.multiturn.enable=True"
            raise DataError(f"{what} must be text, not a {type(value).__name__}{hint}")
        return value


def row_fields(
    row: TokenRow, config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, where: str
) -> Row:
    """The tensors of a sample, of at most `data.max_length` tokens."""
    length, most = len(row.ids), config.max_length
    if length > most and config.truncation == "error":
        raise DataError(
            f"{where}: the sample has {length} tokens, more than data.max_length={most}; raise "
            "that, or cut such samples with data.truncation=left or right"
        )
    ids = truncate(row.ids, most, config.truncation)
    mask = truncate(row.loss_mask(), most, config.truncation)
    if not any(mask):
        advice = "; raise that, or cut the other side" if length > most else ""
        raise DataError(
            f"{where}: the sample has {length} tokens, and none is trained of those within "
            f"data.max_length={most} (data.truncation={config.truncation}){advice}"
        )
    width = most if config.pad_mode == "right" else len(ids)
    pad_id = tokenizer.pad_token_id
    assert isinstance(pad_id, int)
    attention_mask = right_pad([[1] * len(ids)], width, 0)[0]  # (L,)
    return {
        "input_ids": right_pad([ids], width, pad_id)[0],
        "attention_mask": attention_mask,
        "position_ids": compute_position_ids(attention_mask),
        "loss_mask": right_pad([mask], width, 0)[0],
    }


def token_batch(rows: Sequence[Row], pad_id: int) -> Batch:
    """Samples as engines take them; see `engine_rows`."""
    return engine_rows([_tokens_and_mask(row) for row in rows], pad_id)


def _tokens_and_mask(row: Row) -> tuple[list[int], list[int]]:
    """Without padding, wherever that is."""
    names = ("input_ids", "attention_mask", "loss_mask")
    missing = [name for name in names if not isinstance(row.get(name), Tensor)]
    if missing:
        raise DataError(
            f"a row of the data set has no tensor {', '.join(missing)} (data.custom_cls); it has "
            f"{', '.join(row)}"
        )
    kept = row["attention_mask"].bool()
    return row["input_ids"][kept].tolist(), row["loss_mask"][kept].tolist()


def engine_rows(samples: Sequence[tuple[Sequence[int], Sequence[int]]], pad_id: int) -> Batch:
    """Tokens with verl's loss masks as rows of a batch.

    The first token of a sample is its prompt and all others are its response, of which those are
    seen by the loss whose predecessor has a 1 in the mask.
    """
    width = max(2, *(len(ids) for ids, _ in samples))
    input_ids = right_pad([ids for ids, _ in samples], width, pad_id)  # (B, 1 + R)
    attention_mask = right_pad([[1] * len(ids) for ids, _ in samples], width, 0)
    loss_mask = right_pad([mask for _, mask in samples], width, 0)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "responses": input_ids[:, 1:].contiguous(),
        "response_mask": loss_mask[:, :-1] * attention_mask[:, 1:],
    }


def files_key(files: str | Sequence[str], config: Any) -> str:
    """The config key that named these files, for errors."""
    given = [files] if isinstance(files, str) else list(files)
    return "data.val_files" if given == config.val_files else "data.train_files"


class MultiTurnSFTDataset(TableDataset):
    """One row a conversation, in which all messages of the assistant are trained.

    The fields are those of `SFTDataset`.
    """

    def _required(self) -> dict[str, str]:
        self._keys = self.config.multiturn
        return {self._keys.messages_key: "data.multiturn.messages_key"}

    def _check(self, row: int) -> None:
        self._messages(row)
        self._template_kwargs(row)

    def __getitem__(self, item: int) -> Row:
        where = self._table.where(item)
        try:
            row = self._tokens(item)
        except ConversationMismatch as error:
            raise DataError(
                f"{where}: {error}; data.ignore_input_ids_mismatch=True trains on its messages as "
                "the template writes each of them alone"
            ) from error
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        return row_fields(row, self.config, self.tokenizer, where)

    def _tokens(self, item: int) -> TokenRow:
        messages = self._messages(item)
        conversations = ConversationTokenizer(self.tokenizer, self._template_kwargs(item))
        try:
            return conversations.whole(messages)
        except ConversationMismatch:
            if not self.config.ignore_input_ids_mismatch:
                raise
            return conversations.one_by_one(messages)

    def _messages(self, row: int) -> list[Message]:
        key = self._keys.messages_key
        what = f"{self._table.where(row)}: the value of {key!r} (data.multiturn.messages_key)"
        messages = chat_messages(self._given(row, key), what)
        if not any(message["role"] == ASSISTANT for message in messages):
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise DataError(
                f"{what} has nothing to train on: no message of {ASSISTANT!r}, only of {roles}"
            )
        # Templates ask what is in the content, also where there are calls of tools alone.
        return [{"content": "", **message} for message in messages]

    def _template_kwargs(self, row: int) -> dict[str, Any]:
        kwargs = dict(self.config.apply_chat_template_kwargs)
        tools = self._given(row, self._keys.tools_key)
        if tools:
            kwargs["tools"] = self._tools(row, tools)
        thinking = self._given(row, self._keys.enable_thinking_key)
        if thinking is not None:
            kwargs["enable_thinking"] = self._thinking(row, thinking)
        return kwargs

    def _given(self, row: int, column: str) -> Any:
        """A value of the row, less the fields that it has only because other rows have them."""
        value = self._table.rows[row].get(column)
        return _without_nulls(value) if self._table.is_of_parquet(row) else value

    def _thinking(self, row: int, value: Any) -> bool:
        if value not in (0, 1):
            key = self._keys.enable_thinking_key
            raise DataError(
                f"{self._table.where(row)}: the value of {key!r} "
                f"(data.multiturn.enable_thinking_key) must be true or false; got {value!r}"
            )
        return bool(value)

    def _tools(self, row: int, value: Any) -> list[dict[str, Any]]:
        key = self._keys.tools_key
        what = f"{self._table.where(row)}: the value of {key!r} (data.multiturn.tools_key)"
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise DataError(f"{what} is no JSON: {error}") from error
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise DataError(f"{what} must be a list of schemas, or JSON text of one")
        return value


def _without_nulls(value: Any) -> Any:
    """A parquet column holds None wherever one row lacks a field that another one has."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
