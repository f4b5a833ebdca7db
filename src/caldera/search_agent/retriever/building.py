"""`caldera retriever build`: a corpus becomes an index, which appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from caldera.errors import ConfigError
from caldera.search_agent.retriever.bm25 import write_bm25
from caldera.search_agent.retriever.index import BM25_FOLDER, DENSE_FOLDER, METHODS, IndexNote
from caldera.search_agent.retriever.passages import Passages, read_corpus, write_passages
from caldera.tracking import progress_iter

__all__ = ["BuildOptions", "add_passages", "build_index"]


@dataclass(frozen=True)
class BuildOptions:
    """How an index is searched: by which method, with which encoder."""

    method: str = "bm25"
    model: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"--method={self.method!r} must be one of {', '.join(METHODS)}")
        if (self.model is None) != (self.method == "bm25"):
            raise ConfigError(
                f"--method={self.method}: --model names the encoder of dense and hybrid indexes, "
                "and of those alone"
            )


def build_index(corpus: Sequence[Path], folder: Path, options: BuildOptions) -> IndexNote:
    """Index the passages of the files, in a folder that is new."""
    _recover(folder)
    if folder.exists():
        raise ConfigError(f"--index={folder} exists already; --add adds passages to it")
    with _aside(folder) as unfinished:
        count = write_passages(read_corpus(corpus), unfinished)
        return _write(unfinished, count, options, earlier=None)


def add_passages(corpus: Sequence[Path], folder: Path, device: str = "cpu") -> IndexNote:
    """Put more passages behind those of an index, which is then as if built of all of them.

    Vectors are computed of the new ones alone. Word statistics are of the whole corpus, and so
    counted anew.
    """
    _recover(folder)
    note = IndexNote.read(folder)
    with _aside(folder) as unfinished:
        passages = chain(Passages(folder), read_corpus(corpus))
        count = write_passages(passages, unfinished)
        options = BuildOptions(note.method, note.model, device)
        return _write(unfinished, count, options, earlier=folder)


def _write(folder: Path, count: int, options: BuildOptions, earlier: Path | None) -> IndexNote:
    passages = Passages(folder)
    if options.method != "dense":
        texts = progress_iter(passages.texts(), count, "Reading passages")
        write_bm25(texts, folder / BM25_FOLDER)
    if options.model is not None:
        # Only those who need torch wait for it.
        from caldera.search_agent.retriever.dense import Encoder, write_vectors

        known = IndexNote.read(earlier).passages if earlier else 0
        new = progress_iter(passages.texts(known), count - known, "Encoding passages")
        vectors = earlier / DENSE_FOLDER if earlier else None
        encoder = Encoder(options.model, options.device)
        write_vectors(new, count, folder / DENSE_FOLDER, encoder, vectors)
    note = IndexNote(options.method, count, _found_again(options.model))
    note.write(folder)
    return note


def _found_again(model: str | None) -> str | None:
    """The encoder's name, by which a service finds it that is started in another folder."""
    return str(Path(model).resolve()) if model and Path(model).is_dir() else model


def _recover(folder: Path) -> None:
    """Put an index back that was being replaced when the build was killed."""
    folder = folder.resolve()
    replaced = _beside(folder, "replaced")
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f"{folder.name}.{what}")


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """A folder beside, which takes the place of `folder` at the end, if nothing fails."""
    folder = folder.resolve()  # it may be `.`, or a link
    unfinished = _beside(folder, "unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a build that was killed
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        replaced = _beside(folder, "replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if folder.exists():
            folder.rename(replaced)  # a service that has it open goes on with it
        unfinished.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
