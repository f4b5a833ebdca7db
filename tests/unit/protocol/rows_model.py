"""A naive model of DataProto, for tests: a list of row dicts and plain loops."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from caldera.protocol import DataProto

Kinds = dict[str, tuple[Any, tuple[int, ...]]]
"""By key the dtype, and the shape of one row."""

NAN = float("nan")
VALUES: dict[str, list[Any]] = {
    "O": [None, "", "text", NAN, {"score": NAN, "tags": ["a"]}, {}, [1, [2]], (), 7, -0.5, True,
          {"deep": {"list": [None, NAN]}}],
    "i": [0, 1, 2],
    "f": [0.0, 1.5, NAN],
    "U": ["", "abc"],
}  # fmt: skip


@dataclass
class Rows:
    """A DataProto as a list of dicts. No key is in two parts; the kinds say in which it is."""

    rows: list[dict[str, Any]]
    tensors: Kinds | None
    columns: Kinds
    meta: dict[str, Any]

    def take(self, numbers: Iterable[int]) -> Rows:
        return replace(self, rows=[self.rows[number] for number in numbers])

    def keep(self, tensors: list[str], columns: list[str], meta: list[str]) -> Rows:
        kept = Rows(
            [{key: row[key] for key in tensors + columns} for row in self.rows],
            None if self.tensors is None else {key: self.tensors[key] for key in tensors},
            {key: self.columns[key] for key in columns},
            {key: self.meta[key] for key in meta},
        )
        return kept if columns or self.tensors is not None else replace(kept, rows=[])

    def parts(self) -> list[list[str]]:
        return [list(self.tensors or {}), list(self.columns), list(self.meta)]


def cell(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


def texts(rows: list[dict[str, Any]]) -> list[str]:
    """What compares types as well, and NaN with NaN."""
    return [repr({key: cell(row[key]) for key in sorted(row)}) for row in rows]


def rows_of(data: DataProto) -> list[dict[str, Any]]:
    tensors = {} if data.batch is None else dict(data.batch.items())
    cells = {**tensors, **data.non_tensor_batch}
    return [{key: cells[key][number] for key in cells} for number in range(len(data))]


def assert_models(data: DataProto, model: Rows) -> None:
    """All rows, kinds and meta_info agree."""
    tensors = {} if data.batch is None else dict(data.batch.items())
    assert (data.batch is None) == (model.tensors is None)
    assert {k: (t.dtype, tuple(t.shape[1:])) for k, t in tensors.items()} == (model.tensors or {})
    assert {k: (c.dtype, c.shape[1:]) for k, c in data.non_tensor_batch.items()} == model.columns
    assert texts(rows_of(data)) == texts(model.rows)
    assert texts([data.meta_info]) == texts([model.meta])
    data.check_consistency()


def build(
    rows: int, tensors: Kinds | None, columns: Kinds, meta: dict[str, Any], seed: int
) -> tuple[DataProto, Rows]:
    """A DataProto of these kinds, filled at random, and the same as rows."""
    random = Random(seed)
    parts: dict[str, torch.Tensor] = {}
    for key, (dtype, shape) in (tensors or {}).items():
        choices = [0, 1, 2, 3] + [NAN] * (dtype.is_floating_point and random.random() < 0.3)
        numbers = random.choices(choices, k=rows * math.prod(shape))
        parts[key] = torch.tensor(numbers, dtype=torch.float64).to(dtype).reshape(rows, *shape)
    arrays: dict[str, np.ndarray] = {}
    for key, (dtype, shape) in columns.items():
        arrays[key] = np.empty((rows, *shape), dtype)
        for place in np.ndindex(arrays[key].shape):
            arrays[key][place] = random.choice(VALUES[np.dtype(dtype).kind])
    data = DataProto(None if tensors is None else TensorDict(parts, [rows]), arrays, dict(meta))
    model = [{key: cell(value) for key, value in row.items()} for row in rows_of(data)]
    return data, Rows(model, tensors, columns, meta)


def gathered(metas: list[dict[str, Any]]) -> dict[str, Any]:
    """The meta_info of a concat whose other keys agree."""
    merged: dict[str, Any] = {}
    for meta in metas:
        for key, value in meta.items():
            if key != "metrics":
                merged[key] = value
                continue
            for name, number in value.items():
                merged.setdefault("metrics", {}).setdefault(name, []).append(number)
    return merged
