"""Samplers: `native` (paged, continuous batching, any device) and `hf` (transformers' generate)."""

from __future__ import annotations

from caldera.rollout.base import ROLLOUTS, Completion, Request, Rollout, SamplingParams
from caldera.rollout.hf import HFRollout
from caldera.rollout.native.engine import NativeRollout

__all__ = [
    "ROLLOUTS",
    "Completion",
    "HFRollout",
    "NativeRollout",
    "Request",
    "Rollout",
    "SamplingParams",
]
