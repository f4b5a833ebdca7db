"""Files that appear whole, or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `path` if nothing goes wrong."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield aside
        flush(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Have a file, or all files of a folder, on disk before the rename that declares them
    complete."""
    for file in (path, *path.rglob("*")) if path.is_dir() else (path,):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())


def write_text_atomic(path: Path, pieces: Iterable[str]) -> None:
    """Join pieces of text in a file that appears whole, or not at all."""
    # A lone surrogate in a decoded response is no UTF-8; its backslash form is valid JSON.
    with (
        written_aside(path) as aside,
        aside.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file,
    ):
        file.writelines(pieces)
