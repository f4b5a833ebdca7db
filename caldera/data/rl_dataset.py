"""The prompts of a reinforcement learning run."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from caldera.data.chat import (
    Message,
    chat_messages,
    render_chat,
    require_chat_template,
    tokenize_text,
)
from caldera.data.files import Row, RowTable, read_rows
from caldera.data.length_filter import fitting_prompts
from caldera.data.order import seeded_permutation
from caldera.data.padding import compute_position_ids, left_pad, truncate
from caldera.errors import DataError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from caldera.config import DataConfig

logger = logging.getLogger(__name__)


class RLHFDataset(Dataset[Row]):
    """Rows of data files, each with the tokens of its prompt.

    An item is the row itself plus

    - `input_ids`, `attention_mask`, `position_ids`: (P,) int64, left-padded to
      P = `data.max_prompt_length`
    - `raw_prompt_ids`: the same tokens as a list, without padding
    - `raw_prompt`: the chat messages, if `data.return_raw_chat`
    - `full_prompts`: the text of the templated chat, if `data.return_full_prompt`
    - `index`, `tools_kwargs`, `interaction_kwargs`: from the row's `extra_info`
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
        self.config = config
        require_chat_template(tokenizer, config.apply_chat_template_kwargs)
        self._key = _files_key(data_files, config)
        self._table: RowTable = read_rows(
            data_files,
            key=self._key,
            required={config.prompt_key: "data.prompt_key"},
        )
        self._selected = self._select(max_samples)
        """The rows of the table that are part of the data set, in order."""
        prompts = [self._messages(row) for row in self._selected]
        if config.filter_overlong_prompts:
            kept = fitting_prompts(
                prompts,
                tokenizer,
                max_length=config.max_prompt_length,
                template_kwargs=config.apply_chat_template_kwargs,
                workers=config.filter_overlong_prompts_workers,
            )
            self._selected = [self._selected[position] for position in kept]

    def __len__(self) -> int:
        return len(self._selected)

    def __getitem__(self, item: int) -> Row:
        row = self._selected[item]
        # Whoever gets the row may change it, and the next epoch must not see that.
        fields = copy.deepcopy(self._table.rows[row])
        fields |= self._prompt_fields(row)
        extra_info = fields.get("extra_info") or {}
        if not isinstance(extra_info, dict):
            kind = type(extra_info).__name__
            raise DataError(f"{self._table.where(row)}: extra_info must be a dict, not a {kind}")
        index = extra_info.get("index")
        fields["index"] = 0 if index is None else index
        fields["tools_kwargs"] = self._tools_kwargs(extra_info, row)
        fields["interaction_kwargs"] = extra_info.get("interaction_kwargs") or {}
        return fields

    def column_values(self, name: str) -> set[Any]:
        """The different values of a column, None among them if a row has none."""
        return {self._table.rows[row].get(name) for row in self._selected}

    def require_column(self, name: str, role: str) -> None:
        """Raise DataError unless every file has the column, which has this role."""
        self._table.require_column(name, self._key, role)

    def _select(self, max_samples: int) -> list[int]:
        total = len(self._table.rows)
        if not 0 < max_samples < total:
            return list(range(total))
        logger.info("using %d of %d rows", max_samples, total)
        if not self.config.shuffle:
            return list(range(max_samples))
        assert self.config.seed is not None, "loading a configuration settles its seeds"
        return seeded_permutation(total, self.config.seed)[:max_samples]

    def _messages(self, row: int) -> list[Message]:
        key = self.config.prompt_key
        what = f"{self._table.where(row)}: the value of {key!r} (data.prompt_key)"
        return chat_messages(self._table.rows[row][key], what)

    def _prompt_fields(self, row: int) -> Row:
        config = self.config
        messages = self._messages(row)
        try:
            text = render_chat(self.tokenizer, messages, config.apply_chat_template_kwargs)
        except DataError as error:
            raise DataError(f"{self._table.where(row)}: {error}") from error
        ids = tokenize_text(self.tokenizer, text)
        if len(ids) > config.max_prompt_length and config.truncation == "error":
            raise DataError(
                f"{self._table.where(row)}: the prompt has {len(ids)} tokens, more than "
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

    def _tools_kwargs(self, extra_info: dict[str, Any], row: int) -> dict[str, Any]:
        # In a parquet file, every tool of any row is a field of all rows, None where not given.
        given = extra_info.get("tools_kwargs") or {}
        tools_kwargs = {tool: kwargs for tool, kwargs in given.items() if kwargs is not None}
        if extra_info.get("need_tools_kwargs") and not tools_kwargs:
            logger.warning(
                "%s: extra_info asks for tools_kwargs and has none", self._table.where(row)
            )
        return tools_kwargs


def _files_key(data_files: str | Sequence[str], config: DataConfig) -> str:
    files = [data_files] if isinstance(data_files, str) else list(data_files)
    return "data.train_files" if files == list(config.train_files) else "data.val_files"
