"""From raw rows to parquet files: the steps that all data sets have in common."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow
import pyarrow.parquet

from caldera.data.files import EXTENSIONS, Row, RowTable, read_rows
from caldera.data.prepare.preparer import PREPARERS, Preparer, Source
from caldera.data.rl_dataset import fitting_prompts
from caldera.errors import DataError
from caldera.storage.writing import written_aside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


# ---- Raw rows from the Hugging Face hub; the only file that imports the library `datasets`


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


MEDIA_COLUMNS = ("images", "videos", "audios")


@dataclass(frozen=True)
class LengthLimit:
    """Which prompts are too long, and how many processes find out."""

    tokenizer: PreTrainedTokenizerBase
    max_prompt_length: int
    processes: int = 1


def prepare(
    name: str,
    *,
    output: Path,
    raw: Path | None = None,
    length_limit: LengthLimit | None = None,
    limit: int | None = None,
) -> list[Path]:
    """Write a parquet file for each split of the data set, and return the files.

    Raw rows come from the folder `raw`, or from the hub if there is none; `limit` is the number of
    rows of a split to take, before those with long prompts are dropped.
    """
    preparer = PREPARERS[name]
    if raw is not None and raw.resolve() == output.resolve():
        raise DataError(f"--output={output} is the folder of the raw files, which must stay")
    written = []
    for source, table in _tables(preparer, raw):
        rows = list(islice(_rows(preparer, source, table), limit))
        if not rows:
            raise DataError(f"{table.files[0]} has no rows for the {source.split} split of {name}")
        if length_limit is not None:
            rows = _short_enough(rows, length_limit)
        file = output / f"{source.split}.parquet"
        write_parquet(rows, file)
        logger.info("%s: %d rows, of %d raw ones", file, len(rows), len(table.rows))
        written.append(file)
    return written


def write_parquet(rows: list[Row], file: Path) -> None:
    """A file that appears whole, or not at all."""
    columns = dict.fromkeys(column for row in rows for column in row)
    # Of columns, unlike fields of structs, pyarrow sees only those of the first row.
    table = pyarrow.table({c: [row.get(c) for row in rows] for c in columns})
    try:
        with written_aside(file) as aside:
            pyarrow.parquet.write_table(table, aside)
    except OSError as error:
        raise DataError(f"--output: cannot write {file}: {error.strerror or error}") from error


def _tables(preparer: Preparer, folder: Path | None) -> Iterator[tuple[Source, RowTable]]:
    """Each split's source with its raw rows."""
    if folder is not None:
        for source, file in _local_files(preparer, folder):
            yield source, read_rows(str(file), key="--raw")
        return
    for split in preparer.splits:
        source = next(source for source in preparer.sources if source.split == split)
        yield source, hub_rows(source)


def _local_files(preparer: Preparer, folder: Path) -> list[tuple[Source, Path]]:
    if not folder.is_dir():
        raise DataError(f"--raw={folder}: there is no such folder")
    found, missing = [], []
    for split in preparer.splits:
        sources = [source for source in preparer.sources if source.split == split]
        if first := _first_file(sources, folder):
            found.append(first)
        else:
            missing.append((split, _wanted(sources)))
    if not found:
        raise DataError(f"--raw={folder}: the folder has no {_wanted(list(preparer.sources))}")
    for split, wanted in missing:
        logger.warning("no %s split: %s has no %s", split, folder, wanted)
    return found


def _first_file(sources: list[Source], folder: Path) -> tuple[Source, Path] | None:
    for source in sources:
        for extension in EXTENSIONS:
            file = folder / f"{source.file}{extension}"
            if file.is_file():
                return source, file
    return None


def _wanted(sources: list[Source]) -> str:
    names = dict.fromkeys(f"{source.file}.*" for source in sources)
    return f"{' or '.join(names)} ({', '.join(EXTENSIONS)})"


def _rows(preparer: Preparer, source: Source, table: RowTable) -> Iterator[Row]:
    seen: set[str] = set()
    for index, raw in enumerate(table.rows):
        try:
            row = preparer.to_row(raw, source)
        except DataError as error:
            raise DataError(f"{table.where(index)}: {error}") from error
        if row is None:
            continue
        if preparer.unique_prompts:
            prompt = json.dumps(row["prompt"], sort_keys=True)
            if prompt in seen:
                continue
            seen.add(prompt)
        row["extra_info"] = {"split": source.split, "index": index, **row["extra_info"]}
        yield row | {column: raw[column] for column in MEDIA_COLUMNS if column in raw}


def _short_enough(rows: list[Row], limit: LengthLimit) -> list[Row]:
    kept = fitting_prompts(
        [row["prompt"] for row in rows],
        limit.tokenizer,
        max_length=limit.max_prompt_length,
        template_kwargs={},
        workers=limit.processes,
        key="--max-prompt-length",
    )
    return [rows[position] for position in kept]
