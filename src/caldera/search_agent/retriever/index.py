"""An index: a folder of passages that can be searched by words, by meaning, or by both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy

from caldera.errors import ConfigError, DataError
from caldera.search_agent.retriever.bm25 import BM25Searcher
from caldera.search_agent.retriever.passages import Passage, Passages

# ---- Places of passages with their scores, the best first, and how two such lists become one

Ranking = list[tuple[int, float]]
"""(place of a passage, its score), the best first; those of equal scores in the order of places."""

BLOCK = 64
FUSION_CONSTANT = 60
"""Of reciprocal rank fusion: how little the first ranks stand out."""


class Searcher(Protocol):
    """One way to search the passages of an index."""

    def search(self, queries: Sequence[str], topk: int) -> list[Ranking]: ...


def best(scores: numpy.ndarray[Any, Any], topk: int, above: float = -numpy.inf) -> Ranking:
    """The passages of the highest scores that are greater than `above`, out of all scores. (N,)"""
    places = numpy.flatnonzero((scores >= _bound(scores, topk)) & (scores > above))
    order = numpy.lexsort((places, -scores[places]))[:topk]
    return [(int(place), float(scores[place])) for place in places[order]]


def _bound(scores: numpy.ndarray[Any, Any], topk: int) -> float:
    """Not more than the score of rank `topk`, and not much less.

    Of blocks of scores, `topk` have a highest one that is at least this. Selecting among these few
    is much faster than among all scores, most of which are equal.
    """
    blocks = len(scores) // BLOCK
    if blocks <= topk:
        return -numpy.inf
    highest = scores[: blocks * BLOCK].reshape(blocks, BLOCK).max(axis=1)
    return float(numpy.partition(highest, blocks - topk)[blocks - topk])


def fused(rankings: Sequence[Ranking], topk: int) -> Ranking:
    """Reciprocal rank fusion: a passage gets 1 / (60 + its rank) from each list that has it."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, (place, _) in enumerate(ranking, start=1):
            scores[place] = scores.get(place, 0.0) + 1 / (FUSION_CONSTANT + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:topk]


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
    """What `index.json` says of an index."""

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
                f"{folder} holds {len(self.passages)} passages, and {NOTE} tells of "
                f"{note.passages}; build the index anew"
            )
        self._searchers: list[Searcher] = []
        if self.method != "dense":
            self._searchers.append(BM25Searcher(folder / BM25_FOLDER))
        if self.method != "bm25":
            # Only those who need torch wait for it.
            from caldera.search_agent.retriever.dense import DenseSearcher, Encoder

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
