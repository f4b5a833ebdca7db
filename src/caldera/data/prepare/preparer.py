"""How a data set is prepared: where its raw rows are, and what becomes of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from caldera.data.chat import Message
from caldera.data.files import Row
from caldera.errors import DataError
from caldera.registry import Registry


class HubTable(NamedTuple):
    """A split of a data set on the Hugging Face hub."""

    path: str
    name: str | None
    split: str


@dataclass(frozen=True)
class Source:
    """Where the raw rows of a split come from."""

    split: str
    file: str
    """The file's name in the raw folder, without its extension."""
    hub: HubTable
    data_source: str
    """The name of the prepared rows, unless the preparer has reasons for another one."""


ToRow = Callable[[Row, Source], Row | None]
"""A raw row to a prepared one; None if it does not belong to the split or is of no use."""


@dataclass(frozen=True)
class Preparer:
    """How a data set is prepared."""

    sources: tuple[Source, ...]
    """Of several sources of a split, the first is taken that the raw folder holds."""
    to_row: ToRow
    unique_prompts: bool
    """Whether a prompt that came before is left out."""

    @property
    def splits(self) -> list[str]:
        return list(dict.fromkeys(source.split for source in self.sources))


PREPARERS: Registry[Preparer] = Registry("data set")


def register_preparer(
    name: str, *sources: Source, unique_prompts: bool = False
) -> Callable[[ToRow], ToRow]:
    """Decorate the function that makes a row of a raw row of the data set."""

    def add(to_row: ToRow) -> ToRow:
        PREPARERS.register(name)(Preparer(sources, to_row, unique_prompts))
        return to_row

    return add


def rl_row(
    data_source: str,
    prompt: str | list[Message],
    *,
    ability: str,
    ground_truth: object,
    style: str = "rule",
    **extra_info: Any,
) -> Row:
    """A row in verl's schema; a prompt that is a string is the user's message.

    Split and index are put in later, when the row's place is known.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {
        "data_source": data_source,
        "prompt": messages,
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": ground_truth},
        "extra_info": {name: value for name, value in extra_info.items() if value is not None},
    }


def text_of(raw: Row, *columns: str) -> str:
    """The text in the first of the columns that has any."""
    for column in columns:
        value = raw.get(column)
        if isinstance(value, str) and value.strip():
            return value
    wanted = " or ".join(map(repr, columns))
    raise DataError(f"no text in the column {wanted}; the columns are {', '.join(raw)}")
