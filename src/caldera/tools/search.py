"""The tool that searches: passages of a retrieval service for the queries of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from caldera.errors import ConfigError
from caldera.tools.base import BaseTool, ToolLimits, ToolResponse, read_options
from caldera.tools.retrieval import ATTEMPTS, Document, RetrieverClient
from caldera.tools.schemas import OpenAIFunctionSchema, OpenAIFunctionToolSchema

__all__ = ["SearchTool"]

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


@dataclass(frozen=True)
class SearchOptions:
    """Keys of the tool's `config`, beside the limits of every tool."""

    retrieval_service_url: str = ""
    topk: int = 3
    """Passages that a query gets."""
    attempts: int = ATTEMPTS
    enable_global_rate_limit: bool = True
    """False: `rate_limit` does not hold."""

    def __post_init__(self) -> None:
        if type(self.topk) is not int or self.topk < 1:
            raise ConfigError(f"config.topk={self.topk!r} must be an integer above 0")
        if not isinstance(self.enable_global_rate_limit, bool):
            raise ConfigError(
                f"config.enable_global_rate_limit={self.enable_global_rate_limit!r} "
                "must be true or false"
            )


class SearchTool(BaseTool):
    """Asks `retrieval_service_url`; attempts that fail are repeated, with longer and longer pauses.

    `timeout` is that of one attempt.
    """

    default_limits = ToolLimits(timeout=30, num_workers=120, rate_limit=120)

    def __init__(
        self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        options = read_options(SearchOptions, config, type(self).__name__)
        timeout = self.limits.timeout
        if timeout is None:
            raise ConfigError("config.timeout=null: a search needs a number of seconds")
        self._client = RetrieverClient(
            options.retrieval_service_url, options.topk, timeout, options.attempts,
            key="config.retrieval_service_url",
        )  # fmt: skip
        # The client sees to attempts and their timeouts.
        self.limits = replace(self.limits, timeout=None, attempts=1)
        if not options.enable_global_rate_limit:
            self.limits = replace(self.limits, rate_limit=None)

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
