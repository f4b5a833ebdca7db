"""Data in memory: rows of Python lists, pandas, `datasets`, or files, as a run reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from caldera.data.files import Row, read_rows
from caldera.data.plain_rows import TRUTH, UNNAMED, with_truth
from caldera.errors import DataError
from caldera.storage.writing import write_text_atomic

File: TypeAlias = str | PathLike[str]
Dataset: TypeAlias = File | Sequence[File] | Iterable[Mapping[str, Any]]
"""Rows as dicts, a pandas DataFrame, a `datasets.Dataset`, a pyarrow Table, or files."""

OF_RUNS = ("prompt", "data_source", TRUTH, "agent_name")
"""Columns that a run reads itself; others reach rewards by name."""


def rows_of(data: Any, what: str = "dataset") -> list[Row]:
    """The rows of any form of data; `what` names it in errors."""
    if is_files(data):
        files = [data] if isinstance(data, str | PathLike) else list(data)
        return read_rows([str(file) for file in files], key=what).rows
    if hasattr(data, "to_pylist"):  # pyarrow
        data = data.to_pylist()
    elif hasattr(data, "to_list"):  # datasets
        data = data.to_list()
    elif hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        data = data.to_dict("records")
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise DataError(
            f"{what}: takes a list of dicts, a pandas DataFrame, a datasets.Dataset (a split of a "
            f"DatasetDict), or files, and got {type(data).__name__}"
        )
    rows = list(data)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"{what}: row {number} is no dict, but {row!r:.80}")
    if not rows:
        raise DataError(f"{what} has no rows")
    return [dict(row) for row in rows]


def is_files(data: Any) -> bool:
    """Whether data are named, not given."""
    if isinstance(data, str | PathLike):
        return True
    return (
        isinstance(data, Sequence)
        and len(data) > 0
        and all(isinstance(each, str | PathLike) for each in data)
    )


@dataclass(frozen=True)
class Prompts:
    """Rows for reinforcement learning."""

    rows: list[Row]
    columns: tuple[str, ...]
    """What rewards can ask for by name, beside prompt, data_source and ground_truth."""
    are_text: bool
    """Whether prompts are plain text, not messages."""


def prompts_of(data: Any, what: str = "dataset") -> Prompts:
    """Rows with prompts. A row in verl's form (`reward_model`) stays as it is; of any other, the
    reference answer becomes the ground truth, and all columns go to `extra_info`."""
    rows = rows_of(data, what)
    for number, row in enumerate(rows):
        if row.get("prompt") is None:
            raise DataError(
                f"{what}: row {number} has no column 'prompt' (text, or chat messages); its "
                f"columns are {', '.join(map(str, row)) or 'none'}"
            )
    made = [_row(number, row) for number, row in enumerate(rows)]
    columns = dict.fromkeys(name for row in made for name in row["extra_info"])
    return Prompts(made, tuple(columns), isinstance(rows[0]["prompt"], str))


def _row(number: int, row: Row) -> Row:
    if not isinstance(row.get(TRUTH), Mapping):
        row = with_truth(row, row, {*OF_RUNS, "extra_info", "ability"})
    info = {"index": number, **(row.get("extra_info") or {}), "prompt": row["prompt"]}
    kept = {name: row[name] for name in OF_RUNS if name in row}
    return {"data_source": UNNAMED, **kept, "extra_info": info}


def write_rows(rows: Sequence[Row], file: Path, what: str) -> None:
    """A JSON-lines file of the rows."""

    def plain(value: Any) -> Any:
        if hasattr(value, "tolist"):  # NumPy's arrays and numbers
            return value.tolist()
        raise TypeError(f"{type(value).__name__} {value!r:.60}")

    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(json.dumps(row, ensure_ascii=False, default=plain) + "\n")
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{what}: row {number} holds what JSON has not, {error}: convert or drop it"
            ) from error
    write_text_atomic(file, lines)
