"""The retriever: passages on disk, indexes over them, and the service that searches them."""

from __future__ import annotations

from caldera.search_agent.retriever.command import BuildOptions, add_passages, build_index
from caldera.search_agent.retriever.index import Hit, Index
from caldera.search_agent.retriever.server import RetrieverServer

__all__ = ["BuildOptions", "Hit", "Index", "RetrieverServer", "add_passages", "build_index"]
