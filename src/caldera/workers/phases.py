"""What surrounds the work on a batch: models come to the device, and its use is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from caldera.engine import Engine
from caldera.models.flops import promised_flops
from caldera.protocol import DataProto, tensors_of


@contextmanager
def on_device(*engines: Engine | None, optimizer: bool = False) -> Iterator[None]:
    """Offloaded models, of the first the optimiser too if asked, are on the device meanwhile."""
    present = [engine for engine in engines if engine is not None]
    for position, engine in enumerate(present):
        engine.onload(optimizer=optimizer and position == 0)
    yield
    for engine in present:
        engine.offload()


@contextmanager
def mfu_timer(
    role: str, engine: Engine, data: DataProto, epochs: int = 0
) -> Iterator[dict[str, float]]:
    """Yields a dict that in the end holds `perf/mfu/{role}`: needed over promised arithmetic.

    `epochs` passes forward and backward over the batch; 0 is one pass forward. Where either number
    is unknown, as on a CPU, the dict stays empty.
    """
    metrics: dict[str, float] = {}
    start = time.perf_counter()
    yield metrics
    promised = promised_flops(engine.device)
    if promised is None:
        return
    torch.cuda.synchronize(engine.device)
    seconds = time.perf_counter() - start
    tensors = tensors_of(data)
    lengths = tensors["attention_mask"].sum(1).tolist()
    answers = int(tensors["response_mask"].sum())
    needed = engine.arithmetic.flops(lengths, answers, epochs > 0)
    if needed is not None:
        work = needed * max(epochs, 1) / engine.sharers
        metrics[f"perf/mfu/{role}"] = work / seconds / promised
