"""Rows without verl's columns: what stands in their place."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from caldera.data.files import Row, RowTable

UNNAMED = "data"
"""The data source of rows that name none, under which validation reports them."""
TRUTHS = ("ground_truth", "answer", "solution", "label", "target")
"""Columns of the reference answer: the first that a row has is its ground truth."""
TRUTH = "reward_model"
"""verl's column of it."""


def completed(table: RowTable, prompt_key: str, source_key: str) -> RowTable:
    """The table, whose files may lack the columns that name a scorer and hold the ground truth.

    Rows of a file without `reward_model` have the columns of theirs in `extra_info`, where score
    functions find them. `table.columns` stay those of the files.
    """
    rows = []
    for number, row in enumerate(table.rows):
        columns = table.columns_of(number)
        if TRUTH not in columns:
            row = with_truth(row, columns, {prompt_key, source_key, "extra_info"})
        if source_key not in columns:
            row = {**row, source_key: UNNAMED}
        rows.append(row)
    return replace(table, rows=rows)


def with_truth(row: Row, columns: Collection[str], known: set[str]) -> Row:
    """A row with its reference answer as the ground truth, and its columns that are not known to
    the run in `extra_info`."""
    truth = next((row[name] for name in TRUTHS if row.get(name) is not None), None)
    completed = {**row, TRUTH: {"style": "rule", "ground_truth": truth}}
    given = row.get("extra_info") or {}
    if isinstance(given, dict):  # else the data set says what is wrong
        others = {name: row[name] for name in columns if name not in known}
        completed["extra_info"] = {**others, **given}
    return completed
