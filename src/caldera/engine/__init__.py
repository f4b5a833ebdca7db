"""Training engines: one model with its optimiser."""

from __future__ import annotations

from caldera.engine.base import (
    ENGINES,
    Engine,
    EngineOptions,
    ForwardPlan,
    LossAndMetrics,
    LossFn,
    OutputName,
    Outputs,
)
from caldera.engine.fsdp1 import Fsdp1Layout
from caldera.engine.fsdp2 import Fsdp2Layout
from caldera.engine.local import LocalEngine
from caldera.engine.megatron import build_megatron

__all__ = [
    "ENGINES",
    "Engine",
    "EngineOptions",
    "ForwardPlan",
    "Fsdp1Layout",
    "Fsdp2Layout",
    "LocalEngine",
    "LossAndMetrics",
    "LossFn",
    "OutputName",
    "Outputs",
    "build_megatron",
]
