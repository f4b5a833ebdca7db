"""The rows of a data set, which its own code may filter, map or replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from caldera.data.files import Row, RowTable
from caldera.errors import DataError

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
        """What a data set's own code put in the place of the rows; `source` names that code."""
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
        self, function: Callable[..., Any], with_indices: bool = False,
        fn_kwargs: Mapping[str, Any] | None = None, **others: Any,
    ) -> Rows:  # fmt: skip
        """The rows for which the function says true."""
        _check_arguments("filter", others)
        call = _caller(function, with_indices, fn_kwargs)
        return self.select([i for i, row in enumerate(self._rows) if call(dict(row), i)])

    def map(
        self, function: Callable[..., Any], with_indices: bool = False,
        fn_kwargs: Mapping[str, Any] | None = None,
        remove_columns: str | Sequence[str] = (), **others: Any,
    ) -> Rows:  # fmt: skip
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
