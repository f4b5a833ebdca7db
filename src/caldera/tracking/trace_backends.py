"""Traces of MLflow and Trackio, which are imported when they are opened."""

from __future__ import annotations

import os
from typing import Any

from caldera.tracking.backends import experiment_id, tracking_uri
from caldera.tracking.traces import GENERATION, TRACERS, Span, Trace, TracedRun

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
