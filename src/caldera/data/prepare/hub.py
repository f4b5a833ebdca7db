"""Raw rows from the Hugging Face hub; the only file that imports the library `datasets`."""

from __future__ import annotations

from caldera.data.files import RowTable
from caldera.data.prepare.preparer import Source
from caldera.errors import DataError


def hub_rows(source: Source) -> RowTable:
    """All rows of a split, downloaded unless they are in the library's cache."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            "--hub needs the package datasets: pip install datasets, or download "
            f"{source.file}.jsonl (or .parquet) and name its folder with --raw"
        ) from error
    table = source.hub
    try:
        loaded = load_dataset(table.path, table.name, split=table.split)
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"--hub: cannot load {table.path}: {first}") from error
    # Through Arrow, because images would otherwise come decoded and could not be written again.
    rows = loaded.with_format("arrow")[:].to_pylist()
    return RowTable(rows, [table.path], [0], [list(rows[0]) if rows else []])
