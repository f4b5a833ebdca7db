"""Whole conversations, for supervised fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from caldera.data.chat import Message, chat_messages, require_chat_template
from caldera.data.conversation import (
    ASSISTANT,
    ConversationMismatch,
    ConversationTokenizer,
    TokenRow,
)
from caldera.data.files import Row, RowTable, read_rows
from caldera.data.sft_dataset import TEMPLATE_KEY, files_key, row_fields
from caldera.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from caldera.config import SFTDataConfig


class MultiTurnSFTDataset(Dataset[Row]):
    """One row a conversation, in which everything is trained that the assistant says.

    The fields are those of `SFTDataset`.
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: SFTDataConfig,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self._keys = config.multiturn
        require_chat_template(tokenizer, config.apply_chat_template_kwargs, TEMPLATE_KEY)
        self._table: RowTable = read_rows(
            parquet_files,
            key=files_key(parquet_files, config),
            required={self._keys.messages_key: "data.multiturn.messages_key"},
        )
        for row in range(len(self._table.rows)):  # a mistake is told before the first step
            self._messages(row)
            self._template_kwargs(row)

    def __len__(self) -> int:
        return len(self._table.rows)

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
