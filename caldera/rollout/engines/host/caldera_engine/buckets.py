"""Weights in files of shared memory: how they lie in there, and how they are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""Every tensor begins at a multiple of this many bytes."""

Bucket = dict[str, Any]
"""path, bytes, checksum, and entries: name, dtype, shape and offset of each tensor."""


def checksum(words: Tensor) -> int:
    """The sum of 64-bit words, which wraps around: as fast as memory is read."""
    return int(words.view(torch.int64).sum())


def map_file(path: str, size: int) -> Tensor:
    """The bytes of a file as a tensor (size,), which shares its memory."""
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def read_bucket(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Each tensor with its name. Raises ValueError unless the content is what was written."""
    memory = map_file(bucket["path"], bucket["bytes"])
    found = checksum(memory)
    if found != bucket["checksum"]:
        raise ValueError(
            f"weights in {bucket['path']} have the checksum {found}, not {bucket['checksum']}"
        )
    for name, dtype, shape, offset in bucket["entries"]:
        kind = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        yield name, memory[offset : offset + size].view(kind).view(shape)


def read_buckets(buckets: list[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Of all of them, one after the other."""
    for bucket in buckets:
        yield from read_bucket(bucket)
