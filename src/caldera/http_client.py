"""Asking servers for JSON, again where another attempt may succeed."""

from __future__ import annotations

import asyncio
import json
import math
import time
import urllib.request
from collections.abc import Awaitable, Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.error import HTTPError
from weakref import WeakKeyDictionary

T = TypeVar("T")
Errors = tuple[type[Exception], ...]
BUSY = frozenset([408, 425, 429, *range(500, 1000)])
"""Statuses that are worth another attempt."""


class NoAnswer(Exception):
    """A server did not give the JSON that it was asked for."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Unavailable(NoAnswer):
    """Another attempt may succeed."""


class Refused(NoAnswer):
    """Another attempt would be answered the same."""


@dataclass(frozen=True)
class Retries:
    """How often something is attempted; pauses double up to the longest. The error of the last
    attempt is raised."""

    attempts: int
    first_pause: float
    longest_pause: float = math.inf

    def run(self, attempt: Callable[[], T], retried: Errors = (Unavailable,)) -> T:
        for pause in self._pauses():
            try:
                return attempt()
            except retried:
                time.sleep(pause)
        return attempt()

    async def run_async(
        self, attempt: Callable[[], Awaitable[T]], retried: Errors = (Unavailable,)
    ) -> T:
        for pause in self._pauses():
            try:
                return await attempt()
            except retried:
                await asyncio.sleep(pause)
        return await attempt()

    def _pauses(self) -> Iterator[float]:
        pause = self.first_pause
        for _ in range(self.attempts - 1):
            yield pause
            pause = min(2 * pause, self.longest_pause)


class JsonClient:
    """Posts JSON from the thread that calls, on a connection for each request."""

    def __init__(self, retried: Container[int] = BUSY, *, by_proxy: bool = True) -> None:
        """`retried`: statuses after which a server is Unavailable; after others it has Refused.
        `by_proxy`: through the proxy of the environment, if there is one."""
        self._retried = retried
        handlers = [] if by_proxy else [urllib.request.ProxyHandler({})]
        self._opener = urllib.request.build_opener(*handlers)

    def post(self, url: str, body: bytes, silence_s: float) -> Any:
        """The JSON of the response, in one attempt; the server may be silent for so long.

        Raises Unavailable and Refused.
        """
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=silence_s) as response:
                return json.load(response)
        except HTTPError as error:
            content = b""
            with error, suppress(OSError, HTTPException):
                content = error.read(2000)
            kind = Unavailable if error.code in self._retried else Refused
            raise kind(f"{error}: {content.decode(errors='replace')}", error.code) from error
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            raise Unavailable(str(error) or type(error).__name__) from error


def httpx_library() -> Any:
    """httpx as huggingface-hub brings it, in releases from 2 on and in those before."""
    try:
        import httpx2 as httpx
    except ModuleNotFoundError:
        import httpx  # type: ignore[no-redef]
    return httpx


class AsyncJsonClient:
    """Asks for JSON over connections that stay open. Tasks of any event loops share it."""

    def __init__(
        self,
        connections: int,
        seconds: float,
        connect_seconds: float | None = None,
        headers: dict[str, str] | None = None,
        characters_shown: int = 500,
    ) -> None:
        """`connections` of an event loop; `characters_shown` of a response in messages."""
        httpx = httpx_library()
        self._httpx, self._places = httpx, connections
        self._seconds, self._shown = seconds, characters_shown
        self._make = partial(
            httpx.AsyncClient,
            headers=headers,
            timeout=httpx.Timeout(None, connect=connect_seconds),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=connections),
        )
        # Connections belong to an event loop, and a process may run one after the other.
        self._of_loop: WeakKeyDictionary[Any, tuple[asyncio.Semaphore, Any]]
        self._of_loop = WeakKeyDictionary()

    async def ask(self, url: str, body: Any = None) -> Any:
        """The JSON of the response to a POST, or to a GET if there is no body, in one attempt.

        Raises Unavailable and Refused.
        """
        loop, method = asyncio.get_running_loop(), "GET" if body is None else "POST"
        if loop not in self._of_loop:
            self._of_loop[loop] = asyncio.Semaphore(self._places), self._make()
        places, client = self._of_loop[loop]
        try:
            # The time is that of the whole response: one that comes in drops is none.
            async with places, asyncio.timeout(self._seconds):
                response = await client.request(method, url, json=body)
        except (self._httpx.InvalidURL, UnicodeError) as error:
            raise Refused(str(error)) from error
        except self._httpx.HTTPError as error:
            raise Unavailable(str(error) or type(error).__name__) from error
        except TimeoutError as error:
            raise Unavailable(f"no answer within {self._seconds:g} s") from error
        status, said = response.status_code, response.text[: self._shown]
        if not response.is_success:
            kind = Unavailable if status in BUSY else Refused
            raise kind(f"status {status}: {said}", status)
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise Unavailable(f"no JSON: {said}", status) from error

    async def close(self) -> None:
        """Close the connections of this event loop."""
        if (connections := self._of_loop.pop(asyncio.get_running_loop(), None)) is not None:
            await connections[1].aclose()
