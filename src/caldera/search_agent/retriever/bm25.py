"""Search by words: BM25; the one file that imports bm25s."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from caldera.errors import ConfigError, DataError
from caldera.installation import install_command
from caldera.search_agent.retriever.ranking import Ranking, best

__all__ = ["BM25Searcher", "write_bm25"]

K1, B = 0.9, 0.4
"""As search engines over passages of Wikipedia have them."""


class BM25Searcher:
    """Searches an index that `write_bm25` wrote, which is mapped into memory."""

    def __init__(self, folder: Path) -> None:
        bm25s = _bm25s()
        try:
            self._index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{folder} holds no BM25 index: {error}") from error

    def search(self, queries: Sequence[str], topk: int) -> list[Ranking]:
        """Passages that share a word with the query; there may be fewer than `topk`."""
        return [self._search_one(words, topk) for words in _words(queries)]

    def _search_one(self, words: list[str], topk: int) -> Ranking:
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return []
        return best(self._index.get_scores(known), topk, above=0.0)


def write_bm25(texts: Iterable[str], folder: Path) -> None:
    """Index texts, whose places are their numbers."""
    read = list(texts)
    if not any(words for text in read for words in _words([text])):
        raise DataError("no passage of the corpus has a word that could be searched for")
    index = _bm25s().BM25(k1=K1, b=B)
    index.index(_words(read, as_numbers=True), show_progress=False)
    index.save(folder, show_progress=False)


def _words(texts: Sequence[str], as_numbers: bool = False) -> Any:
    """Words of two and more letters, in lower case, without those that every text has."""
    return _bm25s().tokenize(
        list(texts), stopwords="english", return_ids=as_numbers, show_progress=False
    )


def _bm25s() -> Any:
    try:
        import bm25s
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"searching by words needs {error.name}, which is not installed: "
            f"{install_command('retriever')}"
        ) from None
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG
    return bm25s
