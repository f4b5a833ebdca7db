"""Weights on their way to an engine: how they lie in a bucket, and how they are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""Every tensor begins at a multiple of this many bytes."""
WORD = 8

Bucket = dict[str, Any]
"""bytes, checksum, and entries: name, dtype, shape and offset of each tensor. They lie in the file
`path`, or in memory of a GPU that `cuda` is the handle of."""
Adapter = dict[str, Any]
"""path of a folder in peft's format, and the checksum of its tensors' file."""
ADAPTER_FILE = "adapter_model.safetensors"


def checksum(words: Tensor) -> int:
    """The sum of 64-bit words, which wraps around: as fast as memory is read."""
    return int(words.view(torch.int64).sum())


def file_checksum(path: str) -> int:
    """The same of a small file, whose end is filled up with zeros."""
    content = Path(path).read_bytes()
    padded = bytearray(content.ljust(-(-len(content) // WORD) * WORD, b"\0"))
    return checksum(torch.frombuffer(padded, dtype=torch.uint8))


def map_file(path: str, size: int) -> Tensor:
    """The bytes of a file as a tensor (size,), which shares its memory."""
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def map_cuda(handle: tuple[Any, ...], size: int) -> Tensor:
    """The bytes of another process's buffer on a GPU as a tensor (size,)."""
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(*handle)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:size]


def read_bucket(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Each tensor with its name. Raises ValueError unless the content is what was written."""
    on_gpu = "cuda" in bucket
    if on_gpu:
        memory = map_cuda(bucket["cuda"], bucket["bytes"])
    else:
        memory = map_file(bucket["path"], bucket["bytes"])
    where = "a buffer of the GPU" if on_gpu else bucket["path"]
    _check(checksum(memory), bucket["checksum"], where)
    for name, dtype, shape, offset in bucket["entries"]:
        kind = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        weight = memory[offset : offset + size].view(kind).view(shape)
        # The buffer is written anew while an engine may still keep what came in it.
        yield name, weight.clone() if on_gpu else weight
    if on_gpu:  # the sender takes it that all has been read
        torch.cuda.current_stream(memory.device).synchronize()


def check_adapter(adapter: Adapter) -> None:
    """Raises ValueError unless the adapter is what was written."""
    path = f"{adapter['path']}/{ADAPTER_FILE}"
    _check(file_checksum(path), adapter["checksum"], path)


def _check(found: int, expected: int, where: str) -> None:
    if found != expected:
        raise ValueError(f"weights in {where} have the checksum {found}, not {expected}")
