"""Queries of many callers, searched together; answers to queries that were asked before."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from caldera.errors import ConfigError, DataError
from caldera.search_agent.retriever.index import Hit, Index
from caldera.threads import in_thread
from caldera.web import HttpServer, Reply, Request, error_detail, json_reply, read_object

Key = tuple[str, int]
Waiting = tuple[Key, "Future[list[Hit]]"]
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
        self._waiting: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        self.cache_hits = 0
        self._thread = threading.Thread(target=self._serve, name="search", daemon=True)
        self._thread.start()

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The best passages of each query."""
        return [found.result() for found in [self._find((query, topk)) for query in queries]]

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

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
        asked = [self._waiting.get()]
        while asked[-1] and len(asked) < MOST_TOGETHER and not self._waiting.empty():
            asked.append(self._waiting.get())
        goes_on, waiting = asked[-1] is not None, [each for each in asked if each is not None]
        for topk in {topk for (_, topk), _ in waiting}:
            self._find_all([each for each in waiting if each[0][1] == topk], topk)
        return goes_on

    def _find_all(self, asked: list[Waiting], topk: int) -> None:
        try:
            searched = self._index.search([query for (query, _), _ in asked], topk)
        except Exception as error:  # noqa: BLE001 -- waiting callers get it
            with self._lock:  # and new requests for the same are searched for again
                for key, _ in asked:
                    if self._cache.pop(key, None) is not None:
                        self._kept_passages -= key[1]
            for _, found in asked:
                found.set_exception(error)
            return
        for (_, found), hits in zip(asked, searched, strict=True):
            found.set_result(hits)


MAX_REQUEST_BYTES = 8 * 2**20
MOST_PASSAGES = 1000
"""For one query."""
MAX_PASSAGES = 32_768
MAX_ANSWER_MB = 256
PATHS = "the paths are POST /retrieve and GET /health"


class TooMuch(DataError):
    """An answer that would be too large."""


class RetrieverServer(HttpServer):
    """Answers from an index until it is closed."""

    def __init__(
        self,
        index: Index,
        host: str,
        port: int,
        topk: int = 3,
        cache_size: int = 10_000,
        *,
        max_passages: int = MAX_PASSAGES,
        max_answer_mb: int = MAX_ANSWER_MB,
    ) -> None:
        """`topk` is that of requests without one. A request asks for `max_passages` at most, all
        queries together, and its answer has at most `max_answer_mb` of text."""
        if not 1 <= topk <= MOST_PASSAGES:
            raise ConfigError(f"--topk={topk} must be between 1 and {MOST_PASSAGES}")
        if max_passages < topk:
            raise ConfigError(f"--max-passages={max_passages} must be at least --topk={topk}")
        if max_answer_mb < 1:
            raise ConfigError(f"--max-answer-mb={max_answer_mb} must be at least 1")
        self.index = index
        self.topk = topk
        self._max_passages = max_passages
        self._max_answer_bytes = max_answer_mb * 2**20
        self.search = BatchedSearch(index, cache_size)

        async def handle(request: Request) -> Reply:
            return await in_thread(self._answer, request)

        try:
            super().__init__(
                handle, host, port, most_bytes=MAX_REQUEST_BYTES, show_error=error_detail
            )
        except ConfigError:
            self.search.close()
            raise

    @property
    def url(self) -> str:
        return f"http://{self.address}/retrieve"

    def close(self) -> None:
        super().close()
        self.search.close()

    def _answer(self, request: Request) -> Reply:
        if (request.method, request.path) == ("GET", "/health"):
            note = {"method": self.index.method, "passages": len(self.index.passages)}
            return json_reply(note | {"cache_hits": self.search.cache_hits})
        if request.method != "POST" or request.path.rstrip("/") != "/retrieve":
            return json_reply(error_detail(404, PATHS), 404)
        try:
            asked = _read(request.body, self.topk)
        except DataError as error:
            return json_reply(error_detail(422, str(error)), 422)
        try:
            return json_reply(self._found(asked))
        except TooMuch as error:
            return json_reply(error_detail(422, str(error)), 422)

    def _found(self, asked: Asked) -> dict[str, Any]:
        """The response's body. Raises TooMuch."""
        wanted = len(asked.queries) * asked.topk
        if wanted > self._max_passages:
            raise TooMuch(
                f"{len(asked.queries)} queries with topk={asked.topk} ask for {wanted} passages: "
                f"a request may ask for {self._max_passages} (--max-passages)"
            )
        found = self.search.search(asked.queries, asked.topk)
        self._check_size(found)
        if asked.with_scores:
            return {"result": [[vars(hit) for hit in hits] for hits in found]}
        return {"result": [[hit.document for hit in hits] for hits in found]}

    def _check_size(self, found: list[list[Hit]]) -> None:
        size = sum(len(hit.document["contents"]) for hits in found for hit in hits)
        if size > self._max_answer_bytes:
            raise TooMuch(
                f"the passages found have {size} characters: an answer may have "
                f"{self._max_answer_bytes} (--max-answer-mb); ask for fewer at a time"
            )


@dataclass(frozen=True)
class Asked:
    """A request."""

    queries: list[str]
    topk: int
    with_scores: bool


def _read(body: bytes, topk: int) -> Asked:
    """DataError where it cannot be answered."""
    request = read_object(body)
    queries = request.get("queries")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise DataError("'queries' must be a list of texts")
    given = request.get("topk")
    topk = topk if given is None else given
    if type(topk) is not int or not 1 <= topk <= MOST_PASSAGES:
        raise DataError(f"'topk' must be a whole number between 1 and {MOST_PASSAGES}")
    with_scores = request.get("return_scores", False)
    if not isinstance(with_scores, bool):
        raise DataError("'return_scores' must be true or false")
    return Asked(queries, topk, with_scores)
