"""What happened in a trajectory, and when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["AGENT", "DETAIL", "GENERATE", "TOOL", "USER", "Timeline"]

GENERATE, TOOL, USER, AGENT = "generate", "tool", "user", "agent"
"""Kinds of events: a turn is sampled, a tool is called, an interaction answers, an agent of which
nothing else is known runs."""
DETAIL = "detail"
"""Key of what traces alone show of an event, such as its tokens."""


class Timeline:
    """The events of one trajectory, in the order in which they ended."""

    def __init__(self, zero: float, is_detailed: bool = False) -> None:
        """`zero` is the moment, of `time.perf_counter`, from which seconds are counted. Whoever
        writes events adds `DETAIL` to them if they are to be detailed."""
        self._zero = zero
        self.is_detailed = is_detailed
        self.events: list[dict[str, Any]] = []

    @contextmanager
    def event(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Note how long the inside takes; it may add to the event."""
        begun = time.perf_counter()
        entry = {"kind": kind, "start": round(begun - self._zero, 4)} | fields
        try:
            yield entry
        finally:
            entry["seconds"] = round(time.perf_counter() - begun, 4)
            self.events.append(entry)

    def seconds(self, kind: str) -> float:
        """The sum over events of a kind."""
        return sum(float(event["seconds"]) for event in self.events if event["kind"] == kind)
