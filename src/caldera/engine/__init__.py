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
from caldera.engine.fsdp1 import Fsdp1Engine
from caldera.engine.fsdp2 import Fsdp2Engine
from caldera.engine.local import LocalEngine
from caldera.engine.megatron import build_megatron

__all__ = [
    "ENGINES",
    "Engine",
    "EngineOptions",
    "ForwardPlan",
    "Fsdp1Engine",
    "Fsdp2Engine",
    "LocalEngine",
    "LossAndMetrics",
    "LossFn",
    "OutputName",
    "Outputs",
    "build_megatron",
]
