"""Queries of many callers, searched together; answers to queries that were asked before."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from caldera.search_agent.retriever.index import Hit, Index

__all__ = ["BatchedSearch"]

Key = tuple[str, int]
Asked = tuple[Key, "Future[list[Hit]]"]
MOST_TOGETHER = 256
USUAL_PASSAGES = 10
"""Of an answer that is kept: those with more take the place of several."""


class BatchedSearch:
    """Searches for any number of threads. One thread does it, for all that wait at a time.

    The answers to the last `cache_size` different queries are kept; fewer, if they have more than
    10 passages each.
    """

    def __init__(self, index: Index, cache_size: int) -> None:
        self._index = index
        self._cache_size = cache_size
        self._cache: OrderedDict[Key, Future[list[Hit]]] = OrderedDict()
        self._kept_passages = 0  # at most; some answers have fewer than topk
        self._lock = threading.Lock()  # over the cache
        self._waiting: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self.cache_hits = 0
        self._searching = ThreadPoolExecutor(1)
        self._thread = threading.Thread(target=self._serve, name="search", daemon=True)
        self._thread.start()

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The best passages of each query."""
        return [found.result() for found in [self._find((query, topk)) for query in queries]]

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()
        self._searching.shutdown()

    def _find(self, key: Key) -> Future[list[Hit]]:
        """Also a query that is being searched for already is not searched for again."""
        with self._lock:
            if (known := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                self.cache_hits += 1
                return known
            found: Future[list[Hit]] = Future()
            if self._cache_size:
                self._keep(key, found)
        self._waiting.put((key, found))
        return found

    def _keep(self, key: Key, found: Future[list[Hit]]) -> None:
        self._cache[key] = found
        self._kept_passages += key[1]
        most = self._cache_size * USUAL_PASSAGES
        while len(self._cache) > self._cache_size or self._kept_passages > most:
            (_, passages), _ = self._cache.popitem(last=False)
            self._kept_passages -= passages

    def _serve(self) -> None:
        while self._serve_some():
            pass

    def _serve_some(self) -> bool:
        """Wait for questions and answer them; False when there will be no more. A function of its
        own, since the answers would else be held until there is another question."""
        if (first := self._waiting.get()) is None:
            return False
        asked = [first]
        while len(asked) < MOST_TOGETHER and not self._waiting.empty():
            another = self._waiting.get()
            if another is None:
                self._waiting.put(None)
                break
            asked.append(another)
        self._answer(asked)
        return True

    def _answer(self, asked: list[Asked]) -> None:
        for topk in {topk for (_, topk), _ in asked}:
            group = [(query, found) for (query, wanted), found in asked if wanted == topk]
            queries = [query for query, _ in group]
            searched = self._searching.submit(self._index.search, queries, topk)
            if (error := searched.exception()) is not None:
                self._fail([((query, topk), found) for query, found in group], error)
                continue
            for (_, found), hits in zip(group, searched.result(), strict=True):
                found.set_result(hits)

    def _fail(self, asked: list[Asked], error: BaseException) -> None:
        """Whoever waits hears of it, and whoever asks again is searched for again."""
        with self._lock:
            for key, _ in asked:
                if self._cache.pop(key, None) is not None:
                    self._kept_passages -= key[1]
        for _, found in asked:
            found.set_exception(error)
