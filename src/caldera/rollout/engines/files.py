"""Weights on their way to an engine: files of shared memory, a bucket in each."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caldera.errors import RolloutError
from caldera.rollout.engines.host.caldera_engine.base import SteppedEngine
from caldera.rollout.engines.host.caldera_engine.buckets import (
    ALIGNMENT,
    Bucket,
    checksum,
    map_file,
)
from caldera.storage.folders import own_folder

SHARED_MEMORY = Path("/dev/shm")

NamedWeights = Iterable[tuple[str, Tensor]]


class WeightFiles:
    """The newest weights, all of them: an engine that was started anew reads them again."""

    def __init__(self, dtype: torch.dtype, bucket_bytes: int, root: Path = SHARED_MEMORY) -> None:
        """Weights are kept in `dtype`; a file has `bucket_bytes`, or one tensor that is larger."""
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._folder = own_folder("caldera-weights", root)
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self.buckets: list[Bucket] = []

    def write(self, stream: NamedWeights) -> None:
        """Replace all weights by those of the stream."""
        self.clear()
        for weights, size in in_buckets(stream, self._dtype, self._bucket_bytes):
            self.buckets.append(self._bucket(weights, size))

    def clear(self) -> None:
        """Give the memory back."""
        for file in self._folder.iterdir():
            file.unlink()
        self.buckets = []

    def push(self, engine: SteppedEngine) -> None:
        """Have the engine read them all."""
        for place, bucket in enumerate(self.buckets):
            engine.load_bucket(bucket, place == 0)

    def close(self) -> None:
        self._remove()

    def _bucket(self, weights: list[tuple[str, Tensor]], size: int) -> Bucket:
        path = self._folder / f"{len(self.buckets):05d}"
        _allocate(path, size)
        memory = map_file(str(path), size)
        entries = fill(memory, weights, self._dtype)
        return {
            "path": str(path), "bytes": size, "checksum": checksum(memory), "entries": entries,
        }  # fmt: skip


class NoFiles(WeightFiles):
    """Of a rank whose engine is another's: weights that ranks gather together pass by."""

    def write(self, stream: NamedWeights) -> None:
        for _ in stream:
            pass


def in_buckets(
    stream: NamedWeights, dtype: torch.dtype, bucket_bytes: int
) -> Iterator[tuple[list[tuple[str, Tensor]], int]]:
    """Weights that fit a bucket together, or one that does not, and the bytes that they take."""
    waiting: list[tuple[str, Tensor]] = []
    size = 0
    for name, weight in stream:
        own = _aligned(weight.numel() * dtype.itemsize)
        if waiting and size + own > bucket_bytes:
            yield waiting, size
            waiting, size = [], 0
        waiting.append((name, weight))
        size += own
    if waiting:
        yield waiting, size


def fill(memory: Tensor, weights: list[tuple[str, Tensor]], dtype: torch.dtype) -> list[list[Any]]:
    """Copy weights into memory (bytes,), one behind the other; returns a bucket's entries."""
    entries, offset = [], 0
    with torch.no_grad():
        for name, weight in weights:
            length = weight.numel() * dtype.itemsize
            place = memory[offset : offset + length].view(dtype)
            place.view(weight.shape).copy_(weight)
            entries.append([name, str(dtype).removeprefix("torch."), list(weight.shape), offset])
            offset += _aligned(length)
    return entries


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _allocate(path: Path, size: int) -> None:
    """Reserve the memory now: a write into memory that is not there would end the process."""
    with path.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise RolloutError(
                f"{path.parent} has no room for {size} bytes of weights: {error.strerror}. "
                "Engines take weights from shared memory, which must hold the whole model; "
                "containers have more of it with --shm-size"
            ) from error
