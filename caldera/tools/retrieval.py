"""Asking a retrieval service for passages: POST /retrieve, as `caldera retriever serve` answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from caldera.errors import ConfigError
from caldera.tools.texts import encodable

__all__ = ["Document", "RetrievalFailed", "RetrieverClient"]

ATTEMPTS = 10
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0
MOST_AT_A_TIME = 128
"""Requests, and so connections, of a process; thousands of trajectories would have thousands."""
BUSY_STATUSES = (408, 425, 429)
"""Those below 500 that are worth another attempt."""


class RetrievalFailed(Exception):
    """There is no answer, whatever was tried; its text is for the model."""


class _Unavailable(Exception):
    """Another attempt may succeed."""


@dataclass(frozen=True)
class Document:
    """A passage that was found."""

    title: str
    text: str

    @classmethod
    def of(cls, contents: str) -> Document:
        """The title stands in quotes in the first line; a text of one line has none."""
        title, newline, text = contents.partition("\n")
        return cls(title.strip().strip('"'), text) if newline else cls("", title)


class RetrieverClient:
    """Asks the service at an address. Tasks of any event loops share it."""

    def __init__(
        self,
        url: str | None,
        topk: int = 3,
        timeout: float = 30.0,
        attempts: int = ATTEMPTS,
        first_pause: float = FIRST_PAUSE_SECONDS,
        key: str = "retriever.url",
    ) -> None:
        """`timeout` is that of one attempt, in seconds; `key` is where the address was given."""
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{key}={url!r} must be the address of a retrieval service, "
                "such as http://127.0.0.1:8000/retrieve"
            )
        self.url = url
        self._topk = topk
        self._timeout = timeout
        self._attempts = attempts
        self._first_pause = first_pause
        # Connections belong to an event loop, and a process may run one after the other.
        self._connections: WeakKeyDictionary[asyncio.AbstractEventLoop, _Connections] = (
            WeakKeyDictionary()
        )

    async def search(self, queries: Sequence[str]) -> list[list[Document]]:
        """The best passages of each query. RetrievalFailed if the service does not give them."""
        pause = self._first_pause
        sent = list(map(encodable, queries))
        for attempts_left in reversed(range(self._attempts)):
            try:
                return _read(await self._post(sent), len(sent))
            except _Unavailable as error:
                if not attempts_left:
                    raise RetrievalFailed(f"the search engine does not work: {error}") from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """Close the connections of this event loop."""
        connections = self._connections.pop(asyncio.get_running_loop(), None)
        if connections is not None:
            await connections.client.aclose()

    async def _post(self, queries: list[str]) -> Any:
        import httpx2

        request = {"queries": queries, "topk": self._topk, "return_scores": True}
        connections = self._connections_here()
        try:
            # The timeout is that of the whole answer: one that comes in drops is none.
            async with connections.places, asyncio.timeout(self._timeout):
                response = await connections.client.post(self.url, json=request)
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise RetrievalFailed(f"the search engine cannot be asked: {error}") from error
        except httpx2.HTTPError as error:
            raise _Unavailable(str(error) or type(error).__name__) from error
        except TimeoutError as error:
            raise _Unavailable(f"no answer within {self._timeout:g} s") from error
        status = response.status_code
        told = f"status {status}: {response.text[:200]}"
        if status >= 500 or status in BUSY_STATUSES:
            raise _Unavailable(told)
        if not response.is_success:
            raise RetrievalFailed(f"the search engine refuses the query, {told}")
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise _Unavailable(f"no JSON: {response.text[:200]}") from error

    def _connections_here(self) -> _Connections:
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            self._connections[loop] = _Connections()
        return self._connections[loop]


class _Connections:
    """Those of one event loop."""

    def __init__(self) -> None:
        import httpx2

        self.places = asyncio.Semaphore(MOST_AT_A_TIME)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=MOST_AT_A_TIME)
        self.client = httpx2.AsyncClient(timeout=None, limits=limits)


def _read(answered: Any, queries: int) -> list[list[Document]]:
    """The passages of an answer, with or without scores."""
    result = answered.get("result") if isinstance(answered, dict) else None
    if not isinstance(result, list) or len(result) != queries:
        raise _Unavailable(f"'result' must be a list for each of {queries} queries")
    return [_documents(hits) for hits in result]


def _documents(hits: Any) -> list[Document]:
    try:
        contents = [hit.get("document", hit)["contents"] for hit in hits]
        return [Document.of(encodable(text)) for text in contents]
    except (AttributeError, KeyError, TypeError) as error:
        raise _Unavailable(f"a list of passages cannot be read: {hits!r:.200}") from error
