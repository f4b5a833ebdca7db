"""What every trainer does with numbers: timing phases, and one number from those of many ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from caldera.protocol import DataProto

Metrics: TypeAlias = dict[str, float]


def reduce_metrics(metrics: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """One number from several workers' or micro-batches': by name the max, the min or the mean."""

    def kind(name: str) -> Callable[[Sequence[float]], Any]:
        return np.max if "max" in name else np.min if "min" in name else np.mean

    return {name: float(kind(name)(values)) for name, values in metrics.items()}


def rank_metrics(output: DataProto) -> dict[str, Any]:
    """The metrics of all ranks: the mean; of memory the highest peak; by name the max or min."""
    metrics: dict[str, Any] = output.meta_info.get("metrics", {})
    return {
        name: _of_ranks(name, value) if isinstance(value, list) else value
        for name, value in metrics.items()
    }


def with_role(metrics: Metrics, output: DataProto) -> Metrics:
    """The metrics with those of another role: processes of its own may have the highest peak."""
    return metrics | {
        name: max(value, metrics.get(name, value)) if _is_peak(name) else value
        for name, value in rank_metrics(output).items()
    }


def _is_peak(name: str) -> bool:
    return "memory" in re.split(r"[/_]", name)


def _of_ranks(name: str, values: Sequence[float]) -> float:
    parts = re.split(r"[/_]", name)
    if _is_peak(name) or "max" in parts:
        return max(values)
    return min(values) if "min" in parts else sum(values) / len(values)


@contextmanager
def marked_timer(name: str, timing_raw: MutableMapping[str, float]) -> Iterator[None]:
    """Add the seconds that the block takes to `timing_raw[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start
