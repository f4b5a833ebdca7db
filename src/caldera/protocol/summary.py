"""What a person reads about a DataProto."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from caldera.protocol.inputs import Column, entries

if TYPE_CHECKING:
    from caldera.protocol.dataproto import DataProto


def data_info(data: DataProto) -> str:
    """One line for each key: shape, dtype and device, or type."""
    return "\n".join(_info_lines(data))


def size_line(data: DataProto, prefix: str) -> str:
    """The memory of the two row parts in one line."""
    tensors = [] if data.batch is None else list(data.batch.values(True, True))
    tensor_bytes = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
    line = (
        f"batch: {_human(tensor_bytes)}, "
        f"non_tensor_batch: {_human(_numpy_bytes(data.non_tensor_batch))}"
    )
    return f"{prefix} {line}" if prefix else line


def _info_lines(data: DataProto) -> Iterator[str]:
    yield f"DataProto with {len(data)} rows"
    yield "batch:"
    for key, tensor in entries(data.batch).items():
        kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        yield f"  {key}: {tuple(tensor.shape)} {kind} on {tensor.device}"
    yield "non_tensor_batch:"
    for key, column in data.non_tensor_batch.items():
        yield f"  {key}: {column.shape} {column.dtype}"
    yield "meta_info:"
    for key, value in data.meta_info.items():
        yield f"  {key}: {type(value).__name__}"


def _numpy_bytes(columns: Mapping[str, Column]) -> int:
    # An object array's own nbytes counts pointers; what it takes to send it says more.
    return sum(
        len(pickle.dumps(column)) if column.dtype == object else column.nbytes
        for column in columns.values()
    )


def _human(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
