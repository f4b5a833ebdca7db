"""The file of prompts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow
import pyarrow.parquet

from caldera.config.offline import GenerationDataConfig
from caldera.data.chat import Message, chat_messages
from caldera.data.files import RowTable, read_rows
from caldera.errors import DataError
from caldera.storage import local_path

RESPONSES = "responses"


@dataclass(frozen=True)
class Questions:
    """The prompts, and the columns that are written out again as they are."""

    table: pyarrow.Table
    prompts: list[list[Message]]
    fingerprint: str
    """SHA-256 of the file."""
    origin: RowTable
    """Without the rows themselves."""

    def where(self, row: int) -> str:
        """Where a prompt comes from, for an error message."""
        return self.origin.where(row)


def read_questions(config: GenerationDataConfig) -> Questions:
    """Every prompt of `data.path`."""
    given = str(config.path)
    rows = read_rows(given, key="data.path", required={config.prompt_key: "data.prompt_key"})
    if RESPONSES in rows.rows[0]:
        raise DataError(
            f"data.path={given!r} has a column {RESPONSES!r} already, which the answers would "
            "replace: rename it or leave it out"
        )
    prompts = [
        chat_messages(row[config.prompt_key], f"{config.prompt_key!r} in {rows.where(number)}")
        for number, row in enumerate(rows.rows)
    ]
    path = Path(local_path(given, "data.path")).expanduser()
    with path.open("rb") as file:
        fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
    return Questions(_table(path, rows), prompts, fingerprint, replace(rows, rows=[]))


def _table(path: Path, rows: RowTable) -> pyarrow.Table:
    """The columns; those of a parquet file keep their types."""
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path)
    try:
        return pyarrow.Table.from_pylist(rows.rows)
    except pyarrow.ArrowException as error:
        raise DataError(f"data.path: {path} has no parquet form: {error}") from error
