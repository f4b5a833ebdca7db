"""The tool that searches: passages of a retrieval service for the queries of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from caldera.errors import ConfigError
from caldera.http_client import AsyncJsonClient, Refused, Retries, Unavailable
from caldera.tools.base import RateOptions, ShippedTool, ToolLimits, ToolResponse, encodable
from caldera.tools.schemas import OpenAIFunctionSchema, OpenAIFunctionToolSchema

# ---- Asking a retrieval service for passages: POST /retrieve, as `caldera retriever serve` answers

ATTEMPTS = 10
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0
MOST_AT_A_TIME = 128
"""Requests, and so connections, of a process; thousands of trajectories would have thousands."""


class RetrievalFailed(Exception):
    """There is no response, whatever was tried; its text is for the model."""


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
    """The passages of a response, with or without scores."""
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


SCHEMA = OpenAIFunctionToolSchema(
    OpenAIFunctionSchema(
        "search",
        "Searches for passages of text that answer the queries.",
        {
            "type": "object",
            "properties": {
                "query_list": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "Queries, each of which is searched for by itself.",
                }
            },
            "required": ["query_list"],
        },
    )
)


@dataclass(frozen=True, kw_only=True)
class SearchOptions(RateOptions):
    """Keys of the tool's `config`, beside the limits of every tool."""

    retrieval_service_url: str = ""
    topk: int = 3
    """Passages that a query gets."""
    attempts: int = ATTEMPTS

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.topk) is not int or self.topk < 1:
            raise ConfigError(f"config.topk={self.topk!r} must be an integer above 0")


class SearchTool(ShippedTool):
    """Asks `retrieval_service_url`; attempts that fail are repeated, with longer and longer pauses.

    `timeout` is that of one attempt.
    """

    options_class = SearchOptions
    default_limits = ToolLimits(timeout=30, num_workers=120, rate_limit=120)

    def __init__(
        self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        options, timeout = self.options, self.limits.timeout
        if timeout is None:
            raise ConfigError("config.timeout=null: a search needs a number of seconds")
        self._client = RetrieverClient(
            options.retrieval_service_url,
            options.topk,
            timeout,
            options.attempts,
            key="config.retrieval_service_url",
        )
        # The client sees to attempts and their timeouts.
        self.limits = replace(self.limits, timeout=None, attempts=1)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema or SCHEMA

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        queries = parameters.get("query_list")
        if (
            not isinstance(queries, list)
            or not queries
            or not all(isinstance(query, str) for query in queries)
        ):
            raise ValueError("query_list must be a list of texts, and not be empty")
        found = await self._client.search(queries)
        metrics = {
            "query_count": len(queries),
            "status": "success",
            "total_results": sum(map(len, found)),
            "api_request_error": None,
        }
        result = "\n---\n".join(map(_shown, found))
        return ToolResponse(json.dumps({"result": result}, ensure_ascii=False)), 0.0, metrics

    async def close(self) -> None:
        await self._client.close()


def _shown(documents: Sequence[Document]) -> str:
    if not documents:
        return "No search results found."
    return "\n\n".join(
        f"Doc {number} (Title: {document.title})\n{document.text}"
        for number, document in enumerate(documents, start=1)
    )
