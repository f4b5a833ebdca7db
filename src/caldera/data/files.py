"""Data files to rows: parquet, Arrow, CSV, JSON and JSON lines, these two also compressed by
gzip."""

from __future__ import annotations

import csv
import difflib
import gzip
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, overload

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from caldera.data.splits import data_set, files_of
from caldera.errors import DataError
from caldera.storage import is_fetched, local_path, shown_url

Row = dict[str, Any]

EXTENSIONS = (".parquet", ".json", ".jsonl", ".json.gz", ".jsonl.gz", ".csv", ".arrow")

SHOWN_ROWS = 5
"""Rows that a message names."""


@dataclass(frozen=True)
class RowTable:
    """The rows of several files, one after another, all with the same columns."""

    rows: list[Row]
    files: list[str]
    """The files' name in messages."""
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

    def columns_of(self, row: int) -> list[str]:
        """The columns of the file that a row comes from."""
        return self.columns[bisect_right(self.starts, row) - 1]

    def require_column(self, column: str, key: str, role: str, remedy: str) -> None:
        """Raise DataError unless every file has the column; `key` is that of the files."""
        for name, columns in zip(self.files, self.columns, strict=True):
            if columns and column not in columns:
                raise DataError(
                    f"{key}: {name} has no column {column!r}, {role}; its columns are "
                    f"{', '.join(columns)}. {remedy}"
                )

    def is_of_parquet(self, row: int) -> bool:
        """Whether None may stand in the row for a field that only others have."""
        return self.file_of(row).endswith(".parquet")


def first_of(places: Sequence[str]) -> str:
    """The first of the places of rows, and how many more there are."""
    more = f" and {len(places) - SHOWN_ROWS} more" if len(places) > SHOWN_ROWS else ""
    return ", ".join(places[:SHOWN_ROWS]) + more


def is_null(value: object) -> bool:
    """Whether a value is missing: null, NaN, which pandas writes for it, or text without a
    character, which is what an empty field of a CSV file is."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def read_rows(
    files: str | Sequence[str], *, key: str, required: Mapping[str, str] | None = None
) -> RowTable:
    """Read all rows of the files; a column that some rows lack is None there.

    `key` is the configuration key that named the files; `required` maps each column that every
    file must have to the configuration key that named the column.
    """
    given = [files] if isinstance(files, str) else files
    found_files = [each for file in given for each in _local_files(file, key)]
    names, paths = [name for name, _ in found_files], [path for _, path in found_files]
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


def _local_files(given: str, key: str) -> list[tuple[str, Path]]:
    """The files that a name stands for, each with its name in messages."""
    data = data_set(given, EXTENSIONS)
    if data is None:
        path = _local_file(given, key)
        return [(_name(given, path), path)]
    return [(f"{path.name} of {given}", path) for path in files_of(data, key, EXTENSIONS)]


def _name(given: str, path: Path) -> str:
    """A fetched file is called by its URL, any other by its path."""
    return shown_url(given) if is_fetched(given) else str(path)


def _local_file(file: str, key: str) -> Path:
    path = Path(local_path(file, key)).expanduser()
    if path.is_file():
        return path
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
        if path.suffix == ".arrow":
            with pyarrow.memory_map(str(path)) as source:
                return _arrow_rows(source)
        if path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as text:
                return list(_csv_rows(text))
        # A byte order mark at the start is not part of the JSON.
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as opened:
            return list(_json_rows(opened.read().decode("utf-8-sig")))
    except (OSError, EOFError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{key}: cannot read {name}: {error}") from error


def _arrow_rows(source: pyarrow.MemoryMappedFile) -> list[Row]:
    """Of a stream, as Hugging Face's `save_to_disk` writes it, or of a file."""
    try:
        table = pyarrow.ipc.open_stream(source).read_all()
    except pyarrow.ArrowInvalid:
        source.seek(0)
        table = pyarrow.ipc.open_file(source).read_all()
    rows: list[Row] = table.to_pylist()
    return rows


def _csv_rows(text: TextIO) -> Iterator[Row]:
    """Every value is text: 007 stays 007."""
    reader = csv.DictReader(text, strict=True)
    for row in reader:
        if None in row or None in row.values():
            raise ValueError(f"line {reader.line_num} has not as many values as the first line")
        yield dict(row)


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


# ---- The rows of a data set, which its own code may filter, map or replace

SPEED_ONLY = {"num_proc", "desc", "load_from_cache_file", "keep_in_memory", "batch_size"}
"""Arguments of Hugging Face's `filter` and `map` that change no row."""


class Rows(Sequence[Row]):
    """Rows, with the methods of a Hugging Face data set that change them most often. None of these
    changes the rows that it is called on."""

    def __init__(self, rows: list[Row], table: RowTable | None, numbers: list[int] | None) -> None:
        """`numbers` are those of the rows in the table; without a table, code gave them."""
        self._rows = rows
        self._table = table
        self._numbers = numbers

    @classmethod
    def of_table(cls, table: RowTable) -> Rows:
        return cls(table.rows, table, list(range(len(table.rows))))

    @classmethod
    def of(cls, given: Any, source: str) -> Rows:
        """The rows of a data set's own code; `source` names that code."""
        if isinstance(given, Rows):
            return given
        rows = given
        if hasattr(given, "iloc") and hasattr(given, "to_dict"):  # a DataFrame of pandas
            rows = [_plain(row) for row in given.to_dict("records")]
        elif hasattr(given, "column_names") and hasattr(given, "to_list"):  # of `datasets`
            rows = given.to_list()
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise DataError(
                f"{source}: self.dataframe must be a list of dicts, a DataFrame of pandas, a "
                f"datasets.Dataset, or what super() put there; got a {type(given).__name__}"
            )
        return cls(rows, None, None)

    def where(self, position: int) -> str:
        """Where a row comes from, for an error message."""
        if self._table is None or self._numbers is None:
            return f"row {position} of self.dataframe"
        return self._table.where(self._numbers[position])

    def file_of(self, position: int) -> str:
        """The file that a row comes from, for an error message."""
        if self._table is None or self._numbers is None:
            return "self.dataframe"
        return self._table.file_of(self._numbers[position])

    @property
    def column_names(self) -> list[str]:
        return list(dict.fromkeys(column for row in self._rows for column in row))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, item: int) -> Row: ...
    @overload
    def __getitem__(self, item: str | slice) -> list[Any]: ...
    def __getitem__(self, item: int | str | slice) -> Row | list[Any]:
        """A row by its position, several by a slice, or a column by its name."""
        if isinstance(item, str):
            return [row[item] for row in self._rows]
        return self._rows[item]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"self.dataframe has filter, map, select, column_names and to_list, not {name!r}; for "
            "more of Hugging Face's methods: self.dataframe = "
            "datasets.Dataset.from_list(self.dataframe.to_list())"
        )

    def select(self, indices: Sequence[int]) -> Rows:
        """The rows at these positions, in this order."""
        chosen = [int(index) for index in indices]
        numbers = None if self._numbers is None else [self._numbers[index] for index in chosen]
        return Rows([self._rows[index] for index in chosen], self._table, numbers)

    def filter(
        self,
        function: Callable[..., Any],
        with_indices: bool = False,
        fn_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> Rows:
        """The rows for which the function returns true."""
        _check_arguments("filter", others)
        call = _caller(function, with_indices, fn_kwargs)
        return self.select([i for i, row in enumerate(self._rows) if call(dict(row), i)])

    def map(
        self,
        function: Callable[..., Any],
        with_indices: bool = False,
        fn_kwargs: Mapping[str, Any] | None = None,
        remove_columns: str | Sequence[str] = (),
        **others: Any,
    ) -> Rows:
        """Each row with the columns that the function returns for it."""
        _check_arguments("map", others)
        call = _caller(function, with_indices, fn_kwargs)
        removed = {remove_columns} if isinstance(remove_columns, str) else set(remove_columns or ())
        made = []
        for index, row in enumerate(self._rows):
            given = dict(row)
            added = call(given, index)
            kept = {column: value for column, value in given.items() if column not in removed}
            made.append(kept | (added or {}))
        return Rows(made, self._table, self._numbers)

    def to_list(self) -> list[Row]:
        return [dict(row) for row in self._rows]


def _caller(
    function: Callable[..., Any], with_indices: bool, fn_kwargs: Mapping[str, Any] | None
) -> Callable[[Row, int], Any]:
    kwargs = dict(fn_kwargs or {})
    if with_indices:
        return lambda row, index: function(row, index, **kwargs)
    return lambda row, _: function(row, **kwargs)


def _check_arguments(method: str, others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name not in SPEED_ONLY and value:
            raise DataError(
                f"self.dataframe.{method} takes no {name}={value!r} here; for all of Hugging "
                "Face's arguments: datasets.Dataset.from_list(self.dataframe.to_list())"
            )


def _plain(value: Any) -> Any:
    """Without arrays of numpy, which pandas has in the place of lists."""
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
