"""`caldera retriever build` and `caldera retriever serve`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from caldera.errors import ConfigError
from caldera.search_agent.retriever.building import BuildOptions, add_passages, build_index
from caldera.search_agent.retriever.index import METHODS, Index
from caldera.search_agent.retriever.server import MAX_ANSWER_MB, MAX_PASSAGES, RetrieverServer

__all__ = ["RetrieverCommand"]


class RetrieverCommand:
    """One call of the command."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.options = parser().parse_args(arguments)

    def run(self) -> None:
        if self.options.action == "build":
            _build(self.options)
        else:
            _serve(self.options)


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
            server.serve_forever()
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
        "--corpus", type=Path, nargs="+", required=True, metavar="FILE",
        help='JSON lines {"id", "contents"}, which may be compressed by gzip',
    )  # fmt: skip
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
        "--max-passages", type=int, default=MAX_PASSAGES,
        help=f"queries times topk of one request, at most ({MAX_PASSAGES})",
    )  # fmt: skip
    serve.add_argument(
        "--max-answer-mb", type=int, default=MAX_ANSWER_MB,
        help=f"text in one answer, at most ({MAX_ANSWER_MB})",
    )  # fmt: skip
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on (8000)")
    serve.add_argument("--device", default="cpu", help="where the encoder runs (cpu)")
    return parser
