"""An index: a folder of passages that can be searched by words, by meaning, or by both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from caldera.errors import ConfigError, DataError
from caldera.search_agent.retriever.passages import Passage, Passages
from caldera.search_agent.retriever.searchers import BM25Searcher, Ranking, Searcher, fused

# ---- Places of passages with their scores, the best first, and how two such lists become one


METHODS = ("bm25", "dense", "hybrid")
NOTE, BM25_FOLDER, DENSE_FOLDER = "index.json", "bm25", "dense"
FORMAT = 1
CANDIDATES = 100
"""Passages of each way of searching that a hybrid search fuses."""


@dataclass(frozen=True)
class Hit:
    """A passage that was found, with its score."""

    document: Passage
    score: float


@dataclass(frozen=True)
class IndexNote:
    """The contents of `index.json`."""

    method: str
    passages: int
    model: str | None = None
    """The encoder, of an index with vectors."""
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        (folder / NOTE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> IndexNote:
        try:
            note = cls(**json.loads((folder / NOTE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"{folder} is no index of `caldera retriever build`: {error}"
            ) from error
        if note.format != FORMAT or note.method not in METHODS:
            raise DataError(f"{folder} is an index of another release ({note}); build it anew")
        return note

    def require(self, method: str, folder: Path) -> None:
        """ConfigError unless the index can be searched by a method."""
        if self.method not in (method, "hybrid"):
            raise ConfigError(
                f"--method={method}: {folder} was built for {self.method}; "
                f"build it with --method={method} or --method=hybrid"
            )


class Index:
    """An index that is open, and can be searched."""

    def __init__(self, folder: Path, method: str | None = None, device: str = "cpu") -> None:
        """`method` is that of the build, unless another is wanted of a hybrid index."""
        note = IndexNote.read(folder)
        self.method = method or note.method
        note.require(self.method, folder)
        self.passages = Passages(folder)
        if len(self.passages) != note.passages:
            raise DataError(
                f"{folder} holds {len(self.passages)} passages, and {NOTE} names "
                f"{note.passages}; build the index anew"
            )
        self._searchers: list[Searcher] = []
        if self.method != "dense":
            self._searchers.append(BM25Searcher(folder / BM25_FOLDER))
        if self.method != "bm25":
            # Only those who need torch wait for it.
            from caldera.search_agent.retriever.searchers import DenseSearcher, Encoder

            encoder = Encoder(str(note.model), device)
            self._searchers.append(DenseSearcher(folder / DENSE_FOLDER, encoder))

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The best passages for each query, the best first."""
        return [
            [Hit(self.passages[place], score) for place, score in ranking]
            for ranking in self._rankings(queries, topk)
        ]

    def _rankings(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        if len(self._searchers) == 1:
            return self._searchers[0].search(queries, topk)
        wide = max(topk, CANDIDATES)
        found = [searcher.search(queries, wide) for searcher in self._searchers]
        return [fused(rankings, topk) for rankings in zip(*found, strict=True)]
