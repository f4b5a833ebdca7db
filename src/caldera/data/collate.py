"""Rows to one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from caldera.errors import ConfigError, DataError

Batch = dict[str, torch.Tensor | npt.NDArray[np.object_]]


def collate_fn(rows: Sequence[dict[str, Any]]) -> Batch:
    """Stack the tensors of the rows; every other value goes into an object array of length B."""
    batch: Batch = {}
    for key in rows[0]:
        values = [_value(row, key, position) for position, row in enumerate(rows)]
        if isinstance(values[0], torch.Tensor):
            batch[key] = _stack(key, values)
        else:
            batch[key] = object_array(values)
    for position, row in enumerate(rows):
        if extra := row.keys() - batch.keys():
            raise DataError(f"row {position} of a batch has {sorted(extra)}, which row 0 has not")
    return batch


def object_array(values: Sequence[Any]) -> npt.NDArray[np.object_]:
    """A 1-d object array, one element a value.

    `np.array(values, dtype=object)` would make two dimensions of lists of equal length.
    """
    array = np.empty(len(values), dtype=object)
    for position, value in enumerate(values):
        array[position] = value
    return array


def _value(row: dict[str, Any], key: str, position: int) -> Any:
    if key not in row:
        raise DataError(f"row {position} of a batch has no {key!r}, which row 0 has")
    return row[key]


def _stack(key: str, values: list[Any]) -> torch.Tensor:
    shapes = {
        tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        for value in values
    }
    if len(shapes) > 1:
        found = ", ".join(sorted(map(str, shapes)))
        raise DataError(f"the rows of a batch hold a {key!r} of different shapes: {found}")
    return torch.stack(values)


# ---- Lists of token ids to padded tensors

TRUNCATION_MODES = ("error", "left", "right", "middle")


def left_pad(
    rows: Sequence[Sequence[float]],
    length: int,
    pad_value: float,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Rows of at most `length` values as one (B, length) tensor, padding before the values."""
    padded = torch.full((len(rows), length), pad_value, dtype=dtype)
    for target, row in zip(padded, rows, strict=True):
        assert len(row) <= length, f"a row of {len(row)} values cannot be padded to {length}"
        target[length - len(row) :] = torch.tensor(row, dtype=dtype)
    return padded


def right_pad(
    rows: Sequence[Sequence[float]],
    length: int,
    pad_value: float,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Rows of at most `length` values as one (B, length) tensor, padding after the values."""
    padded = torch.full((len(rows), length), pad_value, dtype=dtype)
    for target, row in zip(padded, rows, strict=True):
        assert len(row) <= length, f"a row of {len(row)} values cannot be padded to {length}"
        target[: len(row)] = torch.tensor(row, dtype=dtype)
    return padded


def compute_position_ids(attention_mask: torch.Tensor) -> torch.Tensor:
    """Positions that count the attended tokens along the last dimension; 0 on left padding."""
    return (attention_mask.to(torch.int64).cumsum(dim=-1) - 1).clamp(min=0)


def truncate(ids: Sequence[int], max_length: int, mode: str) -> list[int]:
    """At most `max_length` of the ids: the tail (left), the head (right) or both ends (middle)."""
    if mode not in TRUNCATION_MODES:
        raise ConfigError(f"data.truncation={mode!r} is not one of {', '.join(TRUNCATION_MODES)}")
    if len(ids) <= max_length:
        return list(ids)
    if mode == "left":
        return list(ids[len(ids) - max_length :])
    if mode == "right":
        return list(ids[:max_length])
    if mode == "middle":
        head = max_length // 2
        return [*ids[:head], *ids[len(ids) - (max_length - head) :]]
    raise DataError(f"{len(ids)} tokens do not fit in {max_length}, and data.truncation is 'error'")
