"""Asking a retrieval service for passages: POST /retrieve, as `caldera retriever serve` answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from caldera.errors import ConfigError
from caldera.http_client import AsyncJsonClient, Refused, Retries, Unavailable
from caldera.tools.texts import encodable

__all__ = ["Document", "RetrievalFailed", "RetrieverClient"]

ATTEMPTS = 10
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0
MOST_AT_A_TIME = 128
"""Requests, and so connections, of a process; thousands of trajectories would have thousands."""


class RetrievalFailed(Exception):
    """There is no answer, whatever was tried; its text is for the model."""


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
        self._retries = Retries(attempts, first_pause, LONGEST_PAUSE_SECONDS)
        self._client = AsyncJsonClient(MOST_AT_A_TIME, timeout, characters_shown=200)

    async def search(self, queries: Sequence[str]) -> list[list[Document]]:
        """The best passages of each query. RetrievalFailed if the service does not give them."""
        sent = list(map(encodable, queries))
        request = {"queries": sent, "topk": self._topk, "return_scores": True}

        async def attempt() -> list[list[Document]]:
            return _read(await self._client.ask(self.url, request), len(sent))

        try:
            return await self._retries.run_async(attempt)
        except Unavailable as error:
            raise RetrievalFailed(f"the search engine does not work: {error}") from error
        except Refused as error:
            how = "refuses the query," if error.status else "cannot be asked:"
            raise RetrievalFailed(f"the search engine {how} {error}") from error

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self._client.close()


def _read(answered: Any, queries: int) -> list[list[Document]]:
    """The passages of an answer, with or without scores."""
    result = answered.get("result") if isinstance(answered, dict) else None
    if not isinstance(result, list) or len(result) != queries:
        raise Unavailable(f"'result' must be a list for each of {queries} queries")
    return [_documents(hits) for hits in result]


def _documents(hits: Any) -> list[Document]:
    try:
        contents = [hit.get("document", hit)["contents"] for hit in hits]
        return [Document.of(encodable(text)) for text in contents]
    except (AttributeError, KeyError, TypeError) as error:
        raise Unavailable(f"a list of passages cannot be read: {hits!r:.200}") from error
