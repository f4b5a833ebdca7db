"""Back ends of traces, one a file, which imports its library when it is opened."""

from __future__ import annotations

from caldera.tracking.trace_backends import mlflow, trackio

__all__ = ["mlflow", "trackio"]
