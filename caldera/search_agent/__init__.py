"""The search agent: a loop in which the policy searches by tags; the retriever that it asks."""

from __future__ import annotations

from caldera.search_agent.loop import SearchAgentLoop

__all__ = ["SearchAgentLoop"]
