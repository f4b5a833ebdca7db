"""How the parts of several DataProtos become one: side by side (union) or in a row (concat)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from caldera.errors import ProtocolError
from caldera.protocol.inputs import Column, entries

METRICS_KEY = "metrics"


def deep_equal(left: Any, right: Any) -> bool:
    """Equality through containers and arrays, where NaN equals NaN.

    Within tensors it does not, as in `torch.equal`, unless both are the same memory.
    """
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return _tensors_equal(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return _arrays_equal(left, right)
    if isinstance(left, TensorDictBase) and isinstance(right, TensorDictBase):
        return left.batch_size == right.batch_size and deep_equal(entries(left), entries(right))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return _mappings_equal(left, right)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return type(left) is type(right) and _sequences_equal(left, right)
    if isinstance(left, float | np.floating) and isinstance(right, float | np.floating):
        return bool(left == right or (np.isnan(left) and np.isnan(right)))
    return bool(left == right)


def _tensors_equal(left: Any, right: Any) -> bool:
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    if left.dtype != right.dtype or left.device != right.device or left.layout != right.layout:
        return False
    if left.layout != torch.strided:
        # Ragged rows cannot be compared at once.
        return len(left) == len(right) and all(map(torch.equal, left.unbind(), right.unbind()))
    return _same_memory(left, right) or torch.equal(left, right)


def _same_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and device are views of the same numbers."""
    return (
        left.shape == right.shape
        and left.stride() == right.stride()
        and left.data_ptr() == right.data_ptr() != 0
    )


def _arrays_equal(left: Any, right: Any) -> bool:
    if not (isinstance(left, np.ndarray) and isinstance(right, np.ndarray)):
        return False
    if left.shape != right.shape:
        return False
    if left.__array_interface__ == right.__array_interface__:  # the same memory
        return True
    if left.dtype.kind in "fc" and right.dtype.kind in "fc":
        return bool(np.array_equal(left, right, equal_nan=True))
    if left.dtype == object or right.dtype == object:
        return _sequences_equal(left.ravel(), right.ravel())
    return bool(np.array_equal(left, right))


def _sequences_equal(left: Any, right: Any) -> bool:
    return len(left) == len(right) and all(map(deep_equal, left, right))


def _mappings_equal(left: Mapping[Any, Any], right: Mapping[Any, Any]) -> bool:
    return left.keys() == right.keys() and all(deep_equal(left[key], right[key]) for key in left)


def union_dict(
    left: Mapping[str, Any], right: Mapping[str, Any], operation: str, part: str
) -> dict[str, Any]:
    """Both mappings in one; a key of both must have equal values."""
    for key in right:
        if key in left and not deep_equal(left[key], right[key]):
            raise ProtocolError(
                f"{operation}: {part}[{key!r}] differs: "
                f"{describe(left[key])} against {describe(right[key])}"
            )
    return {**left, **{key: value for key, value in right.items() if key not in left}}


def describe(value: Any) -> str:
    """A value, short enough for an error message."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__} of shape {tuple(value.shape)} and dtype {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def union_tensor_dict(left: TensorDict, right: TensorDict) -> TensorDict:
    """A TensorDict with the entries of both; an entry of both must be equal."""
    if left.batch_size != right.batch_size:
        raise ProtocolError(
            f"union_tensor_dict: batch sizes {tuple(left.batch_size)} and "
            f"{tuple(right.batch_size)} differ"
        )
    merged = union_dict(entries(left), entries(right), "union_tensor_dict", "batch")
    return left.copy().update(merged)


def union_numpy_dict(left: Mapping[str, Column], right: Mapping[str, Column]) -> dict[str, Column]:
    """A dict with the arrays of both; an array of both must be equal, where NaN equals NaN."""
    for key, value in [*left.items(), *right.items()]:
        if not isinstance(value, np.ndarray):
            raise ProtocolError(
                f"union_numpy_dict: {key!r} is a {type(value).__name__}, not a numpy array"
            )
    return union_dict(left, right, "union_numpy_dict", "non_tensor_batch")


def list_of_dict_to_dict_of_list(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """[{"a": 1}, {"a": 2}] -> {"a": [1, 2]}; every dict must have the same keys."""
    require_same_keys("list_of_dict_to_dict_of_list", "the dict", rows)
    return {key: [row[key] for row in rows] for key in (rows[0] if rows else ())}


def require_same_keys(operation: str, part: str, mappings: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless every mapping has the keys of the first."""
    for number, mapping in enumerate(mappings):
        unshared = mapping.keys() ^ mappings[0].keys()
        if unshared:
            raise ProtocolError(
                f"{operation}: {part} number {number} differs from number 0 "
                f"in the keys {sorted(unshared)}"
            )


def concat_tensor_dicts(batches: Sequence[TensorDict], operation: str) -> TensorDict:
    """The rows of all batches, in order."""
    if len(batches) == 1:
        return batches[0].copy()
    _require_same_columns(operation, "batch", [entries(batch) for batch in batches])
    return cast(TensorDict, TensorDict.cat(list(batches), 0))


def concat_numpy_dicts(
    columns: Sequence[Mapping[str, Column]], operation: str
) -> dict[str, Column]:
    """The rows of all arrays, in order."""
    if len(columns) == 1:
        return dict(columns[0])
    _require_same_columns(operation, "non_tensor_batch", columns)
    return {key: np.concatenate([part[key] for part in columns]) for key in columns[0]}


def _require_same_columns(operation: str, part: str, mappings: Sequence[Mapping[str, Any]]) -> None:
    require_same_keys(operation, part, mappings)
    for key in mappings[0]:
        if getattr(mappings[0][key], "layout", None) == torch.jagged:
            continue  # the dimension that is ragged has no length to compare
        shapes = [tuple(mapping[key].shape) for mapping in mappings]
        if any(shape[1:] != shapes[0][1:] for shape in shapes):
            raise ProtocolError(f"{operation}: {part}[{key!r}] has rows of unlike shapes: {shapes}")


def concat_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One meta_info: metrics of all become lists, any other key must be equal where it occurs."""
    merged: dict[str, Any] = {}
    metrics: list[Mapping[str, Any]] = []
    for meta in metas:
        others = {key: value for key, value in meta.items() if key != METRICS_KEY}
        merged = union_dict(merged, others, "concat", "meta_info")
        found = meta.get(METRICS_KEY)
        metrics += found if isinstance(found, list) else [] if found is None else [found]
    if any(METRICS_KEY in meta for meta in metas):
        merged[METRICS_KEY] = _gather_metrics(metrics)
    return merged


def _gather_metrics(metrics: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Unlike rows, workers may report different metrics: a key lists the values there are."""
    gathered: dict[str, list[Any]] = {}
    for part in metrics:
        if not isinstance(part, Mapping):
            raise ProtocolError(
                f"concat: meta_info['metrics'] holds {describe(part)}, "
                "neither a dict nor a list of dicts"
            )
        for key, value in part.items():
            gathered.setdefault(key, []).append(value)
    return gathered
