"""Rows to one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from caldera.errors import DataError

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
