"""Training on one batch: epochs, mini-batches, one schedule step."""

from __future__ import annotations

import resource

import torch

from caldera.engine import Engine, ForwardPlan, LossFn
from caldera.protocol import DataProto
from caldera.workers.phases import mfu_timer


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
    with mfu_timer(name, engine.module, data, epochs) as mfu:
        steps = [engine.train(mini_batch, loss_fn, plan) for mini_batch in mini_batches]
    metrics = {key: sum(step[key] for step in steps) / len(steps) for key in steps[0]}
    metrics[f"{name}/grad_norm"] = metrics.pop("grad_norm")
    metrics[f"{name}/lr"] = engine.step_schedule()
    return metrics | mfu | memory_metrics()


def memory_metrics() -> dict[str, float]:
    """Peak memory of this process, and of its GPU where there is one, in GiB."""
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics = {"perf/cpu_memory_used_gb": kibibytes / 2**20}
    if torch.cuda.is_available():
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
    return metrics
