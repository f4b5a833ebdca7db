"""Trackio's traces, which are kept on this machine."""

from __future__ import annotations

from typing import Any

from caldera.tracking.traces import TRACERS, Span, Trace, TracedRun

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
