"""Training on one batch: epochs, mini-batches, one schedule step."""

from __future__ import annotations

import logging
import math
import resource

import torch
from torch import Tensor

from caldera.engine import Engine, ForwardPlan, LossFn
from caldera.protocol import DataProto
from caldera.workers.phases import mfu_timer

logger = logging.getLogger(__name__)


def train_epochs(
    engine: Engine, data: DataProto, loss_fn: LossFn, plan: ForwardPlan, mini_batch_size: int,
    epochs: int, shuffle_seed: int | None, name: str,
) -> dict[str, float]:  # fmt: skip
    """One optimiser step per mini-batch, of `mini_batch_size` rows over all ranks.

    `data` are this rank's rows, the same number on each. Metrics are means over the steps.
    """
    own_size = mini_batch_size // engine.dp_size  # the config's check has seen that it divides
    order = {"shuffle": shuffle_seed is not None}
    mini_batches = data.make_iterator(own_size, epochs, shuffle_seed, order)
    with mfu_timer(name, engine, data, epochs) as mfu:
        steps = [engine.train(mini_batch, loss_fn, plan) for mini_batch in mini_batches]
    metrics = _read(steps, name)
    metrics[f"{name}/lr"] = engine.step_schedule()
    return metrics | mfu | memory_metrics()


def _read(steps: list[dict[str, Tensor]], name: str) -> dict[str, float]:
    """Means over the steps. Only here does anybody wait for the device."""
    found = torch.stack([torch.stack([*step.values()]).float() for step in steps])  # (steps, keys)
    rows: list[list[float]] = found.tolist()
    names = list(steps[0])
    metrics = {key: sum(column) / len(rows) for key, *column in zip(names, *rows, strict=True)}
    for number, row in enumerate(rows):
        norm = row[names.index("grad_norm")]
        if not math.isfinite(norm):
            logger.warning("%s: the gradient norm of step %d is %s: skipped", name, number, norm)
    metrics[f"{name}/grad_norm"] = metrics.pop("grad_norm")
    return metrics


def memory_metrics() -> dict[str, float]:
    """Peak memory of this process, and of its GPU where there is one, in GiB."""
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics = {"perf/cpu_memory_used_gb": kibibytes / 2**20}
    if torch.cuda.is_available():
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
    return metrics
