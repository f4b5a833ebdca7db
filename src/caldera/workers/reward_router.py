"""One address for several servers: a request goes to the one with the least to do."""

from __future__ import annotations

import asyncio
import http.client
import logging
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

from caldera.errors import ConfigError
from caldera.threads import in_thread
from caldera.web import HttpServer, Reply, Request, error_reply

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 256
SECONDS_TO_ANSWER = 600.0
SECONDS_OF_REST = 5.0
"""How long a server that failed is asked only where all others fail too."""


@dataclass(eq=False)
class _Backend:
    url: urllib.parse.SplitResult
    in_flight: int = 0
    answered: int = 0
    rests_until: float = 0.0

    def __str__(self) -> str:
        return self.url.geturl()


class Router:
    """Passes every request on, as it is, to a server that is up.

    A server that cannot be reached or answers with a status from 500 rests for some seconds, and
    the request goes to another one. The response of the last that failed is passed back.
    """

    def __init__(self, host: str, servers: Sequence[str] = ()) -> None:
        """`servers`: addresses, as host:port or URL."""
        self._backends: list[_Backend] = []
        self.use(servers)
        self._free = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._http = HttpServer(self._handle, host)
        self.address = self._http.address

    def use(self, servers: Sequence[str]) -> None:
        """Send requests there from now on."""
        self._backends = [_Backend(parse_address(server)) for server in servers]

    def close(self) -> None:
        self._http.close()

    async def _handle(self, request: Request) -> Reply:
        # All counting happens in the one thread of the event loop.
        now = time.monotonic()
        order = sorted(self._backends, key=lambda b: (b.rests_until > now, b.in_flight, b.answered))
        reply = error_reply(503, "no server is known yet")
        for backend in order:
            reply = await self._ask(backend, request)
            if reply.status < 500:
                break
        return reply

    async def _ask(self, backend: _Backend, request: Request) -> Reply:
        backend.in_flight += 1
        try:
            async with self._free:
                reply = await in_thread(_forward, backend.url, request)
        except (OSError, http.client.HTTPException) as error:
            reply = error_reply(502, f"{backend}: {str(error) or type(error).__name__}")
        finally:
            backend.in_flight -= 1
            backend.answered += 1
        if reply.status >= 500:
            logger.warning("%s answered %s with status %d", backend, request.path, reply.status)
            backend.rests_until = time.monotonic() + SECONDS_OF_REST
        return reply


def parse_address(address: str) -> urllib.parse.SplitResult:
    """host:port or a URL, as the parts of a URL."""
    url = urllib.parse.urlsplit(address if "//" in address else f"http://{address}")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{address!r} is not the address of an HTTP server")
    return url


def _forward(url: urllib.parse.SplitResult, request: Request) -> Reply:
    is_secure = url.scheme == "https"
    connect = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
    connection = connect(url.netloc, timeout=SECONDS_TO_ANSWER)
    try:
        headers = {"Content-Type": "application/json"} if request.body else {}
        connection.request(
            request.method, url.path.rstrip("/") + request.path, request.body or None, headers
        )
        response = connection.getresponse()
        content_type = response.headers.get("Content-Type", "application/json")
        return Reply(response.status, response.read(), content_type)
    finally:
        connection.close()
