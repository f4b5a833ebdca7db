"""Samplers: `native` (paged, continuous batching, any device), `hf` (transformers' generate),
`vllm` and `sglang` (engines with their own copy of the model), `remote` (a remote server), and
custom classes (`sampler_class`)."""

from __future__ import annotations

from caldera.rollout.base import (
    ROLLOUTS,
    Completion,
    Piece,
    Request,
    Rollout,
    SamplingParams,
    StepwiseRollout,
    TrainedPolicy,
    sampler_class,
)
from caldera.rollout.engines import rollout as _engines  # noqa: F401 -- registers them
from caldera.rollout.hf import HFRollout
from caldera.rollout.native.engine import NativeRollout
from caldera.rollout.remote import RemoteRollout
from caldera.rollout.service import AsyncSampler

__all__ = [
    "ROLLOUTS",
    "AsyncSampler",
    "Completion",
    "HFRollout",
    "NativeRollout",
    "Piece",
    "RemoteRollout",
    "Request",
    "Rollout",
    "SamplingParams",
    "StepwiseRollout",
    "TrainedPolicy",
    "sampler_class",
]
