"""Passages on disk: lines of JSON, each found by its place without reading the others."""

from __future__ import annotations

import gzip
import json
import mmap
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, overload

import numpy

from caldera.errors import DataError

Passage = dict[str, Any]

LINES, OFFSETS = "passages.jsonl", "offsets.npy"


class Passages(Sequence[Passage]):
    """The passages of an index; the file is mapped into memory, not read."""

    def __init__(self, folder: Path) -> None:
        try:
            self._offsets = numpy.load(folder / OFFSETS, mmap_mode="r")
            with (folder / LINES).open("rb") as lines:
                self._lines = mmap.mmap(lines.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise DataError(f"{folder} holds no passages of an index: {error}") from error
        if not len(self._offsets) or self._offsets[-1] != len(self._lines):
            raise DataError(f"{folder}: {LINES} is not as it was written; build the index anew")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, place: int) -> Passage: ...

    @overload
    def __getitem__(self, place: slice) -> list[Passage]: ...

    def __getitem__(self, place: int | slice) -> Passage | list[Passage]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        if not 0 <= place < len(self):
            raise IndexError(place)
        passage: Passage = json.loads(self._lines[self._offsets[place] : self._offsets[place + 1]])
        return passage

    def texts(self, start: int = 0) -> Iterator[str]:
        """The text that is searched of each passage, from the one at `start` on."""
        return (self[place]["contents"] for place in range(start, len(self)))


def read_corpus(files: Iterable[Path]) -> Iterator[Passage]:
    """The passages of files of JSON lines, which may be compressed by gzip."""
    for file in files:
        try:
            with _opened(file) as lines:
                yield from _read_lines(lines, file)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"cannot read the corpus {file}: {error}") from error


def _read_lines(lines: Iterable[bytes], file: Path) -> Iterator[Passage]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _passage(line, f"{file}, line {number}")


def _opened(file: Path) -> IO[bytes]:
    if file.suffix == ".gz":
        return gzip.open(file)  # type: ignore[return-value]  # a file of bytes in all but type
    return file.open("rb")


def _passage(line: bytes, where: str) -> Passage:
    try:
        passage = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(passage, dict) or not isinstance(passage.get("contents"), str):
        raise DataError(f"{where}: a passage is an object with a text 'contents'")
    if not isinstance(passage.get("id"), str | int):
        raise DataError(f"{where}: a passage needs an 'id', a text or a whole number")
    return passage | {"id": str(passage["id"])}


def write_passages(passages: Iterable[Passage], folder: Path) -> int:
    """Write them to an index's folder; returns how many there are."""
    offsets = [0]
    with (folder / LINES).open("wb") as lines:
        for passage in passages:
            line = json.dumps(passage, ensure_ascii=False).encode(errors="replace") + b"\n"
            lines.write(line)
            offsets.append(offsets[-1] + len(line))
    if len(offsets) == 1:
        raise DataError("the corpus has no passages")
    numpy.save(folder / OFFSETS, numpy.asarray(offsets, dtype=numpy.int64))
    return len(offsets) - 1
