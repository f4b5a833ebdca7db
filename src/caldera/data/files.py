"""Data files to rows: parquet, JSON and JSON lines, these two also compressed by gzip."""

from __future__ import annotations

import difflib
import gzip
import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from caldera.errors import DataError
from caldera.storage import is_fetched, local_path, shown_url

Row = dict[str, Any]

EXTENSIONS = (".parquet", ".json", ".jsonl", ".json.gz", ".jsonl.gz")

SHOWN_ROWS = 5
"""Rows that a message names."""


@dataclass(frozen=True)
class RowTable:
    """The rows of several files, one after another, all with the same columns."""

    rows: list[Row]
    files: list[str]
    """What messages call the files."""
    starts: list[int]
    """The number of the first row of each file."""
    columns: list[list[str]]
    """The columns of each file; none where it has no rows."""

    def where(self, row: int) -> str:
        """Where a row comes from, for an error message."""
        file = bisect_right(self.starts, row) - 1
        return f"row {row - self.starts[file]} of {self.files[file]}"

    def where_all(self, rows: Sequence[int]) -> str:
        """Where the first of many rows come from."""
        return first_of([self.where(row) for row in rows])

    def file_of(self, row: int) -> str:
        """The file that a row comes from."""
        return self.files[bisect_right(self.starts, row) - 1]

    def require_column(self, column: str, key: str, role: str) -> None:
        """Raise DataError unless every file has the column; `key` is that of the files."""
        for name, columns in zip(self.files, self.columns, strict=True):
            if columns and column not in columns:
                raise DataError(
                    f"{key}: {name} has no column {column!r}, {role}; its columns are "
                    f"{', '.join(columns)}"
                )

    def is_of_parquet(self, row: int) -> bool:
        """Whether None may stand in the row for a field that only others have."""
        return self.file_of(row).endswith(".parquet")


def first_of(places: Sequence[str]) -> str:
    """The first of the places of rows, and how many more there are."""
    more = f" and {len(places) - SHOWN_ROWS} more" if len(places) > SHOWN_ROWS else ""
    return ", ".join(places[:SHOWN_ROWS]) + more


def is_null(value: object) -> bool:
    """Whether a value is missing: null, or NaN, which pandas writes for it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def read_rows(
    files: str | Sequence[str], *, key: str, required: Mapping[str, str] | None = None
) -> RowTable:
    """Read all rows of the files; a column that some rows lack is None there.

    `key` is the configuration key that named the files; `required` maps each column that every
    file must have to the configuration key that named the column.
    """
    given = [files] if isinstance(files, str) else files
    paths = [_local_file(file, key) for file in given]
    names = [_name(file, path) for file, path in zip(given, paths, strict=True)]
    rows: list[Row] = []
    starts: list[int] = []
    columns: list[list[str]] = []
    for path, name in zip(paths, names, strict=True):
        found = _read_file(path, name, key)
        columns.append(list(dict.fromkeys(column for row in found for column in row)))
        if found:
            _check_columns(name, columns[-1], required or {})
        starts.append(len(rows))
        rows.extend(found)
    if not rows:
        raise DataError(f"{key}: the data set has no rows ({', '.join(names) or 'no files'})")
    every = dict.fromkeys(column for of_file in columns for column in of_file)
    return RowTable([{c: row.get(c) for c in every} for row in rows], names, starts, columns)


def _name(given: str, path: Path) -> str:
    """A fetched file is called by its URL, any other by its path."""
    return shown_url(given) if is_fetched(given) else str(path)


def _local_file(file: str, key: str) -> Path:
    path = Path(local_path(file, key)).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise DataError(f"{key}: {path} is a folder, not a file{_near_files(path, path.name)}")
    if not path.parent.is_dir():
        raise DataError(f"{key}: {path} does not exist, nor does its folder {path.parent}")
    raise DataError(f"{key}: {path} does not exist{_near_files(path.parent, path.name)}")


def _near_files(folder: Path, name: str) -> str:
    names = sorted(p.name for p in folder.iterdir() if p.name.endswith(EXTENSIONS))
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.0)
    return f"; {folder} holds {', '.join(close)}" if close else ""


def _read_file(path: Path, name: str, key: str) -> list[Row]:
    if not path.name.endswith(EXTENSIONS):
        known = ", ".join(EXTENSIONS)
        raise DataError(f"{key}: {name} has the extension {path.suffix!r}; known are {known}")
    try:
        if path.suffix == ".parquet":
            rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
            return rows
        # A byte order mark at the start is not part of the JSON.
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as opened:
            return list(_json_rows(opened.read().decode("utf-8-sig")))
    except (OSError, EOFError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{key}: cannot read {name}: {error}") from error


def _json_rows(text: str) -> Iterator[Row]:
    """The objects of a JSON array, or those of JSON lines, whichever the text is."""
    if text.lstrip().startswith("["):
        for number, row in enumerate(json.loads(text)):
            yield _json_object(row, f"element {number}")
        return
    # Not str.splitlines: it would also split at line separators inside JSON strings.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}: {error.msg} (column {error.colno})") from error
        yield _json_object(row, f"line {number}")


def _json_object(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is a {type(row).__name__}, not an object")
    return row


def _check_columns(name: str, columns: Sequence[str], required: Mapping[str, str]) -> None:
    for column, key in required.items():
        if column not in columns:
            raise DataError(
                f"{key}={column!r}: {name} has no such column; its columns are {', '.join(columns)}"
            )
