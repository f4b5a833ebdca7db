"""Traces: what happened in single trajectories, span by span, for a back end to show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from caldera.registry import Registry
from caldera.tracking.backends import require_package
from caldera.tracking.background import Background, Losses

KEY = "actor_rollout_ref.rollout.trace.backend"
TOKENS = "token_ids"
"""Where spans have tokens; their text goes beside them."""
GENERATION = "generation"
"""Kind of spans in which the policy samples; others are "tool" and "user"."""


@dataclass(frozen=True)
class Span:
    """One thing that happened."""

    name: str
    kind: str
    start: float
    """Seconds since 1970."""
    seconds: float
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """A trajectory: what was asked for, what came of it, and the spans between."""

    name: str
    step: int
    start: float
    seconds: float
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    facts: dict[str, Any]
    """By what a trace can be found."""
    spans: list[Span]


@dataclass(frozen=True)
class TracedRun:
    """The facts of a run that a back end may need."""

    project_name: str
    experiment_name: str
    rank: int
    """Of the process that writes; each has its own back end."""


class TraceBackend(Protocol):
    """Receives traces."""

    def write(self, trace: Trace) -> None: ...

    def finish(self) -> None: ...


TRACERS: Registry[Callable[[TracedRun], TraceBackend]] = Registry(KEY)


def check_tracer(name: str | None) -> None:
    """The name is that of a back end whose package is installed; None is for no traces."""
    if name is None:
        return
    _ = TRACERS[name]  # an unknown one raises, and lists the known ones
    require_package(KEY, name)


class TraceWriter(Background[TraceBackend]):
    """Writes traces in a separate thread. A back end that fails loses traces, which are counted
    and told of; the run goes on."""

    def __init__(
        self, name: str, run: TracedRun, decode: Callable[[Sequence[int]], str] | None
    ) -> None:
        """With `decode`, tokens are written as text, too."""
        self._decode = decode
        losses = Losses(name, KEY, "traces")
        super().__init__(losses, f"traces-{name}", partial(TRACERS[name], run))

    def write(self, traces: Sequence[Trace]) -> None:
        """Have the traces of a batch written."""
        if traces:
            self.give(lambda backend: self._write_all(traces, backend), len(traces))

    def _write_all(self, traces: Sequence[Trace], backend: TraceBackend) -> None:
        for trace in traces:
            self.losses.attempt(partial(self._write_one, trace, backend))

    def _write_one(self, trace: Trace, backend: TraceBackend) -> None:
        backend.write(self._with_text(trace))

    def _with_text(self, trace: Trace) -> Trace:
        if self._decode is not None:
            for span in trace.spans:
                for values in (span.inputs, span.outputs):
                    if TOKENS in values:
                        values["text"] = self._decode(values[TOKENS])
        return trace
