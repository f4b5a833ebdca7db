"""`caldera retriever serve`: POST /retrieve, as search agents ask for passages.

    {"queries": [text, ...], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}

Without `return_scores` the documents stand there themselves.
"""

from __future__ import annotations

import json
import logging
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from caldera.errors import ConfigError, DataError
from caldera.search_agent.retriever.batches import BatchedSearch
from caldera.search_agent.retriever.index import Index

__all__ = ["RetrieverServer"]

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 8 * 2**20
SECONDS_TO_SEND_A_REQUEST = 600  # clients keep their connections
MOST_PASSAGES = 1000
PATHS = "the paths are POST /retrieve and GET /health"


class RetrieverServer(ThreadingHTTPServer):
    """Answers from an index until it is shut down."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(
        self, index: Index, host: str, port: int, topk: int = 3, cache_size: int = 10_000
    ) -> None:
        """`topk` is that of requests without one."""
        if not 1 <= topk <= MOST_PASSAGES:
            raise ConfigError(f"--topk={topk} must be between 1 and {MOST_PASSAGES}")
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}, port {port}: {error}") from error
        self.index = index
        self.topk = topk
        self.search = BatchedSearch(index, cache_size)

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}/retrieve"

    def server_close(self) -> None:
        super().server_close()
        if hasattr(self, "search"):  # not if the port was taken
            self.search.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is nothing to report."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def answer(self, queries: list[str], topk: int, with_scores: bool) -> dict[str, Any]:
        """What is sent back."""
        found = self.search.search(queries, topk)
        if with_scores:
            return {"result": [[vars(hit) for hit in hits] for hits in found]}
        return {"result": [[hit.document for hit in hits] for hits in found]}


def _read(body: bytes, topk: int) -> tuple[list[str], int, bool]:
    """The arguments of `answer`. DataError if there are none."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the request must be JSON: {error}") from error
    if not isinstance(request, dict):
        raise DataError("the request must be an object")
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
    return queries, topk, with_scores


class _Handler(BaseHTTPRequestHandler):
    server: RetrieverServer
    protocol_version = "HTTP/1.1"
    timeout = SECONDS_TO_SEND_A_REQUEST
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer leaves in one piece

    def do_GET(self) -> None:
        if self.path != "/health":
            self._send(HTTPStatus.NOT_FOUND, {"detail": PATHS})
            return
        server = self.server
        note = {"method": server.index.method, "passages": len(server.index.passages)}
        self._send(HTTPStatus.OK, note | {"cache_hits": server.search.cache_hits})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or int(length) > MAX_REQUEST_BYTES:
            self.close_connection = True  # its body stays unread
            detail = f"Content-Length must be there, and at most {MAX_REQUEST_BYTES}"
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"detail": detail})
            return
        body = self.rfile.read(int(length))
        if self.path.rstrip("/") != "/retrieve":
            self._send(HTTPStatus.NOT_FOUND, {"detail": PATHS})
            return
        try:
            wanted = _read(body, self.server.topk)
        except DataError as error:
            self._send(HTTPStatus.UNPROCESSABLE_ENTITY, {"detail": str(error)})
            return
        try:
            status, content = HTTPStatus.OK, self.server.answer(*wanted)
        except Exception as error:  # no fault of the request, and others are answered
            logger.warning("a search failed", exc_info=error)
            told = f"the search failed: {type(error).__name__}: {error}"
            status, content = HTTPStatus.INTERNAL_SERVER_ERROR, {"detail": told}
        self._send(status, content)

    def _send(self, status: HTTPStatus, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """No line for each request: there are thousands."""
