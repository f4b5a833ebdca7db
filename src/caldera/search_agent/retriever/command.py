"""`caldera retriever build` and `caldera retriever serve`."""

from __future__ import annotations

import argparse
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rich.console import Console

from caldera.errors import ConfigError
from caldera.search_agent.retriever.index import (
    BM25_FOLDER,
    DENSE_FOLDER,
    METHODS,
    Index,
    IndexNote,
)
from caldera.search_agent.retriever.passages import Passages, read_corpus, write_passages
from caldera.search_agent.retriever.searchers import write_bm25
from caldera.search_agent.retriever.server import MAX_ANSWER_MB, MAX_PASSAGES, RetrieverServer
from caldera.tracking import progress_iter

# ---- `caldera retriever build`: a corpus becomes an index, which appears whole or not at all


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
        from caldera.search_agent.retriever.searchers import Encoder, write_vectors

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


def run(options: argparse.Namespace) -> None:
    """Do what is asked for."""
    if options.action == "build":
        _build(options)
    else:
        _serve(options)


def _build(options: argparse.Namespace) -> None:
    if options.add:
        if options.method is not None or options.model is not None:
            raise ConfigError("--add keeps the method and the model of the index: leave them out")
        note = add_passages(options.corpus, options.index, options.device)
    else:
        chosen = BuildOptions(options.method or "bm25", options.model, options.device)
        note = build_index(options.corpus, options.index, chosen)
    _say(f"{options.index}: {note.passages} passages, searched by {note.method}")


def _serve(options: argparse.Namespace) -> None:
    index = Index(options.index, options.method, options.device)
    with RetrieverServer(
        index,
        options.host,
        options.port,
        options.topk,
        options.cache_size,
        max_passages=options.max_passages,
        max_answer_mb=options.max_answer_mb,
    ) as server:
        _say(
            f"{server.url}: {len(index.passages)} passages, searched by {index.method}. "
            "Ctrl-C ends it."
        )
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            _say("ended")


def _say(text: str) -> None:
    Console().print(text, soft_wrap=True, highlight=False)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="caldera retriever", description="Passages for agents that search."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    build = actions.add_parser("build", help="make an index of files of passages")
    build.add_argument(
        "--corpus",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help='JSON lines {"id", "contents"}, which may be compressed by gzip',
    )
    build.add_argument("--index", type=Path, required=True, metavar="DIR", help="its folder")
    build.add_argument("--method", choices=METHODS, help="how it is searched (bm25)")
    build.add_argument("--model", help="encoder of dense and hybrid: a folder or a hub name")
    build.add_argument("--add", action="store_true", help="add the passages to an index")
    build.add_argument("--device", default="cpu", help="where the encoder runs (cpu)")
    serve = actions.add_parser("serve", help="answer POST /retrieve")
    serve.add_argument("--index", type=Path, required=True, metavar="DIR", help="its folder")
    serve.add_argument("--method", choices=METHODS, help="of a hybrid index, another (hybrid)")
    serve.add_argument("--topk", type=int, default=3, help="passages a query gets (3)")
    serve.add_argument("--cache-size", type=int, default=10_000, help="answers kept (10000)")
    serve.add_argument(
        "--max-passages",
        type=int,
        default=MAX_PASSAGES,
        help=f"queries times topk of one request, at most ({MAX_PASSAGES})",
    )
    serve.add_argument(
        "--max-answer-mb",
        type=int,
        default=MAX_ANSWER_MB,
        help=f"text in one answer, at most ({MAX_ANSWER_MB})",
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on (8000)")
    serve.add_argument("--device", default="cpu", help="where the encoder runs (cpu)")
    return parser
