"""`caldera retriever serve`: POST /retrieve, as search agents ask for passages.

    {"queries": [text, ...], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}

Without `return_scores` the documents stand there themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from caldera.errors import ConfigError, DataError
from caldera.search_agent.retriever.batches import BatchedSearch
from caldera.search_agent.retriever.index import Hit, Index
from caldera.web import JsonHandler, ThreadedServer, read_object

__all__ = ["RetrieverServer"]

MAX_REQUEST_BYTES = 8 * 2**20
SECONDS_BETWEEN_REQUESTS = 600.0  # clients keep their connections
MOST_PASSAGES = 1000
"""For one query."""
MAX_PASSAGES = 32_768
MAX_ANSWER_MB = 256
PATHS = "the paths are POST /retrieve and GET /health"


class TooMuch(DataError):
    """An answer that would be too large."""


class RetrieverServer(ThreadedServer):
    """Answers from an index until it is shut down."""

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
        super().__init__(host, port, _Handler)
        self.index = index
        self.topk = topk
        self._max_passages = max_passages
        self._max_answer_bytes = max_answer_mb * 2**20
        self.search = BatchedSearch(index, cache_size)

    @property
    def url(self) -> str:
        return f"http://{self.address}/retrieve"

    def server_close(self) -> None:
        super().server_close()
        if hasattr(self, "search"):  # not if the port was taken
            self.search.close()

    def answer(self, asked: Asked) -> dict[str, Any]:
        """What is sent back. Raises TooMuch."""
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


class _Handler(JsonHandler):
    server: RetrieverServer
    seconds_between_requests = SECONDS_BETWEEN_REQUESTS

    def most_bytes(self) -> int:
        return MAX_REQUEST_BYTES

    def get(self) -> None:
        if self.path != "/health":
            self.send_json(HTTPStatus.NOT_FOUND, {"detail": PATHS})
            return
        server = self.server
        note = {"method": server.index.method, "passages": len(server.index.passages)}
        self.send_json(HTTPStatus.OK, note | {"cache_hits": server.search.cache_hits})

    def post(self, body: bytes) -> None:
        if self.path.rstrip("/") != "/retrieve":
            self.send_json(HTTPStatus.NOT_FOUND, {"detail": PATHS})
            return
        try:
            asked = _read(body, self.server.topk)
        except DataError as error:
            self._refuse_request(error)
            return
        try:
            content = self.server.answer(asked)
        except TooMuch as error:
            self._refuse_request(error)
            return
        self.send_json(HTTPStatus.OK, content)

    def _refuse_request(self, error: DataError) -> None:
        self.send_json(HTTPStatus.UNPROCESSABLE_ENTITY, {"detail": str(error)})
