"""Normalises and checks the arguments of DataProto."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from caldera.errors import ProtocolError

Column: TypeAlias = NDArray[Any]
Keys: TypeAlias = str | Sequence[str] | None
RowIndices: TypeAlias = Sequence[int] | Sequence[bool] | Column | torch.Tensor
"""Row numbers, or one boolean for each row."""


def entries(batch: TensorDictBase | None) -> dict[str, Any]:
    """The entries of a batch as a dict, since a TensorDict iterates over rows and not over keys."""
    return {} if batch is None else {str(key): value for key, value in batch.items()}


def object_column(values: Sequence[Any]) -> Column:
    """A 1-D object array of the values; numpy alone would make equal-length lists a matrix."""
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def as_column(key: str, value: Column | Sequence[Any]) -> Column:
    """A numpy array as it is, a list as an object column."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list | tuple):
        return object_column(value)
    raise ProtocolError(
        f"from_dict: non_tensors[{key!r}] is a {type(value).__name__}, "
        "neither a numpy array nor a list"
    )


def common_leading_shape(
    operation: str, part: str, arrays: Mapping[str, Any], num_dims: int
) -> tuple[int, ...] | None:
    """The first dimensions that all tensors or arrays share; None where there are none."""
    leading: tuple[int, ...] | None = None
    for key, array in arrays.items():
        shape = tuple(array.shape)
        if len(shape) < num_dims or (leading is not None and shape[:num_dims] != leading):
            shapes = {name: tuple(value.shape) for name, value in arrays.items()}
            raise ProtocolError(
                f"{operation}: {part}[{key!r}] has shape {shape}; the first {num_dims} "
                f"dimension(s) must agree in all of {shapes}"
            )
        leading = shape[:num_dims]
    return leading


def key_list(keys: Keys) -> list[str]:
    """The keys without repetitions; a string is one key, None is no key."""
    if keys is None:
        return []
    return [keys] if isinstance(keys, str) else list(dict.fromkeys(keys))


def subset(part: dict[str, Any], keys: Keys) -> dict[str, Any]:
    """A dict with those keys; None takes all."""
    return dict(part) if keys is None else {key: part[key] for key in key_list(keys)}


def without(part: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """A dict of the other keys."""
    return {key: value for key, value in part.items() if key not in keys}


def require_keys(operation: str, part: str, wanted: Iterable[str], known: Collection[str]) -> None:
    """Raise unless every wanted key is known."""
    for key in wanted:
        if key not in known:
            raise ProtocolError(
                f"{operation}: {part} has no key {key!r} (known: {', '.join(known) or 'none'})"
            )


def row_numbers(operation: str, rows: RowIndices, length: int) -> torch.Tensor:
    """Row numbers or a boolean mask as checked, non-negative row numbers on the CPU."""
    index = _index_tensor(operation, rows)
    if index.dtype == torch.bool:
        if len(index) != length:
            raise ProtocolError(f"{operation}: a mask of {len(index)} rows for {length} rows")
        return index.nonzero().squeeze(1)
    numbers = torch.where(index < 0, index + length, index)
    outside = (numbers < 0) | (numbers >= length)
    if outside.any():
        raise ProtocolError(
            f"{operation}: there is no row {index[outside][0].item()} in {length} rows"
        )
    return numbers


def repeat_counts(operation: str, counts: RowIndices, length: int) -> torch.Tensor:
    """One count for each row, checked, on the CPU."""
    numbers = _index_tensor(operation, counts)
    if numbers.dtype == torch.bool or len(numbers) != length or (numbers < 0).any():
        raise ProtocolError(
            f"{operation}: {counts} for {length} rows; "
            "there must be one non-negative integer for each row"
        )
    return numbers


def _index_tensor(operation: str, rows: RowIndices) -> torch.Tensor:
    values = rows.detach().cpu().numpy() if isinstance(rows, torch.Tensor) else np.asarray(rows)
    if values.size == 0:  # numpy takes an empty list for floats
        values = values.astype(np.int64)
    if values.ndim != 1 or values.dtype.kind not in "biu":
        raise ProtocolError(
            f"{operation}: rows must be a 1-D list, array or tensor of integers or booleans, not a "
            f"{type(rows).__name__} of shape {values.shape} and dtype {values.dtype}"
        )
    return torch.from_numpy(values if values.dtype == bool else values.astype(np.int64))
