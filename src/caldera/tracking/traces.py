"""Traces: what happened in single trajectories, span by span, for a back end to show."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from caldera.registry import Registry
from caldera.tracking.backends import experiment_id, require_package, tracking_uri
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


# ---- MLflow and Trackio, which are imported when they are opened

SESSION = "mlflow.trace.session"
"""The key that MLflow groups traces by."""


@TRACERS.register("mlflow")
class MlflowTraces:
    """Traces of the experiment PROJECT, in the session EXPERIMENT."""

    def __init__(self, run: TracedRun) -> None:
        # A later write in a thread of MLflow's could be lost without anyone knowing.
        os.environ["MLFLOW_ENABLE_ASYNC_TRACE_LOGGING"] = "false"
        import mlflow

        mlflow.set_tracking_uri(tracking_uri())
        self._begin = mlflow.start_span_no_context
        self._client = mlflow.MlflowClient(tracking_uri())
        self._experiment = experiment_id(self._client, run.project_name)
        self._session = run.experiment_name

    def write(self, trace: Trace) -> None:
        whole = self._begin(
            trace.name,
            span_type="AGENT",
            inputs=trace.inputs,
            experiment_id=self._experiment,
            start_time_ns=_ns(trace.start),
            metadata={SESSION: self._session},
            tags={key: str(value) for key, value in {"step": trace.step, **trace.facts}.items()},
        )
        for span in trace.spans:
            kind = {GENERATION: "LLM", "tool": "TOOL"}.get(span.kind, "UNKNOWN")
            part = self._begin(
                span.name,
                span_type=kind,
                parent_span=whole,
                inputs=span.inputs,
                start_time_ns=_ns(span.start),
            )
            part.end(outputs=span.outputs, end_time_ns=_ns(span.start + span.seconds))
        whole.end(outputs=trace.outputs, end_time_ns=_ns(trace.start + trace.seconds))
        self._client.get_trace(whole.trace_id)  # MLflow keeps to itself what it could not write

    def finish(self) -> None:
        """Everything is written."""


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


NAME = "rollout/trace"


@TRACERS.register("trackio")
class TrackioTraces:
    """A run of the project for each process, EXPERIMENT-traces-RANK."""

    def __init__(self, run: TracedRun) -> None:
        import trackio

        self._trace = trackio.Trace
        self._run: Any = trackio.init(
            project=run.project_name,
            name=f"{run.experiment_name}-traces-{run.rank}",
            resume="allow",
            embed=False,
        )

    def write(self, trace: Trace) -> None:
        facts = {"step": trace.step, **trace.facts, **trace.outputs}
        facts["duration_ms"] = trace.seconds * 1000
        spans = [_span(str(number), span) for number, span in enumerate(trace.spans)]
        messages = trace.inputs.get("messages", [])
        self._run.log({NAME: self._trace(messages, facts, spans)}, step=trace.step)

    def finish(self) -> None:
        self._run.finish()


def _span(number: str, span: Span) -> dict[str, Any]:
    return {
        "id": number,
        "name": span.name,
        "kind": span.kind if span.kind in ("generation", "tool") else "span",
        "start_time": span.start,
        "end_time": span.start + span.seconds,
        "duration_ms": span.seconds * 1000,
        "input": span.inputs,
        "output": span.outputs,
    }
