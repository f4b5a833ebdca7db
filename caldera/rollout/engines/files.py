"""Weights on their way to an engine: files of shared memory, a bucket in each."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from caldera.errors import RolloutError
from caldera.rollout.engines.folders import own_folder
from caldera.rollout.engines.host.caldera_engine.buckets import (
    ALIGNMENT,
    Bucket,
    checksum,
    map_file,
)

SHARED_MEMORY = Path("/dev/shm")


class WeightFiles:
    """The newest weights, all of them: an engine that was started anew reads them again."""

    def __init__(self, dtype: torch.dtype, bucket_bytes: int, root: Path = SHARED_MEMORY) -> None:
        """Weights are kept in `dtype`; a file has `bucket_bytes`, or one tensor that is larger."""
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._folder = own_folder("caldera-weights", root)
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self.buckets: list[Bucket] | None = None
        """None before the first weights."""

    def write(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights by those of the stream."""
        for file in self._folder.iterdir():
            file.unlink()
        self.buckets = None
        buckets: list[Bucket] = []
        waiting: list[tuple[str, Tensor]] = []
        size = 0
        for name, weight in stream:
            own = _aligned(weight.numel() * self._dtype.itemsize)
            if waiting and size + own > self._bucket_bytes:
                buckets.append(self._bucket(len(buckets), waiting, size))
                waiting, size = [], 0
            waiting.append((name, weight))
            size += own
        if waiting:
            buckets.append(self._bucket(len(buckets), waiting, size))
        self.buckets = buckets

    def close(self) -> None:
        self._remove()

    def _bucket(self, number: int, weights: list[tuple[str, Tensor]], size: int) -> Bucket:
        path = self._folder / f"{number:05d}"
        _allocate(path, size)
        memory = map_file(str(path), size)
        entries, offset = [], 0
        with torch.no_grad():
            for name, weight in weights:
                length = weight.numel() * self._dtype.itemsize
                place = memory[offset : offset + length].view(self._dtype)
                place.view(weight.shape).copy_(weight)
                entries.append(
                    [name, str(self._dtype).removeprefix("torch."), list(weight.shape), offset]
                )
                offset += _aligned(length)
        return {
            "path": str(path), "bytes": size, "checksum": checksum(memory), "entries": entries,
        }  # fmt: skip


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
