"""Samplers: `native` (paged, continuous batching, any device) and `hf` (transformers' generate)."""

from __future__ import annotations

from caldera.rollout.base import (
    ROLLOUTS,
    Completion,
    Piece,
    Request,
    Rollout,
    SamplingParams,
    StepwiseRollout,
)
from caldera.rollout.hf import HFRollout
from caldera.rollout.native.engine import NativeRollout
from caldera.rollout.service import AsyncSampler

__all__ = [
    "ROLLOUTS",
    "AsyncSampler",
    "Completion",
    "HFRollout",
    "NativeRollout",
    "Piece",
    "Request",
    "Rollout",
    "SamplingParams",
    "StepwiseRollout",
]
