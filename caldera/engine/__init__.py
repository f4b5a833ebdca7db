"""Training engines: one model with its optimiser."""

from __future__ import annotations

from caldera.engine.base import (
    ENGINES,
    Engine,
    ForwardPlan,
    LossAndMetrics,
    LossFn,
    OutputName,
    Outputs,
)
from caldera.engine.local import LocalEngine

__all__ = [
    "ENGINES",
    "Engine",
    "ForwardPlan",
    "LocalEngine",
    "LossAndMetrics",
    "LossFn",
    "OutputName",
    "Outputs",
]
