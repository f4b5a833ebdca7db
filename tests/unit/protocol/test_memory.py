"""What shares memory with its source and what is copied, once."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from caldera.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto


def storages(data: DataProto) -> dict[str, int]:
    assert data.batch is not None
    tensors: Any = data.batch
    return {key: tensor.untyped_storage().data_ptr() for key, tensor in tensors.items()}


@pytest.mark.parametrize(
    "operation",
    [
        lambda data: data.select(["tokens"]),
        lambda data: data[1:3],
        lambda data: data[::2],
        lambda data: data.chunk(2)[1],
        lambda data: data.split(3)[1],
        lambda data: data.repeat(1),
        lambda data: DataProto.concat([data]),
        lambda data: data.select().union(data[:]),
        lambda data: data.select().pop(["tokens"], ["name"]),
        lambda data: data.select().rename("score", "points"),
        lambda data: list(data.make_iterator(2, 1, 0, {"shuffle": False}))[1],
        lambda data: unpad_dataproto(data, 1),
        lambda data: pad_dataproto_to_divisor(data, 2)[0],
        lambda data: DataProto.from_tensordict(data.to_tensordict()),
        copy.copy,
    ],
)  # fmt: skip
def test_views(data: DataProto, operation: Callable[[DataProto], DataProto]) -> None:
    before = storages(data)
    result = operation(data)
    assert {*storages(result).values()} <= {*before.values()}
    assert storages(data) == before


@pytest.mark.parametrize(
    "operation",
    [
        lambda data: data.select(deepcopy=True),
        lambda data: data[[0, 1, 2, 3]],
        lambda data: data.repeat(2),
        lambda data: data.sample_level_repeat([1, 1, 1, 1]),
        lambda data: DataProto.concat(data.chunk(2)),
        copy.deepcopy,
    ],
)
def test_copies(data: DataProto, operation: Callable[[DataProto], DataProto]) -> None:
    assert not {*storages(operation(data)).values()} & {*storages(data).values()}


def test_objects_are_never_copied() -> None:
    values = [{"a": 1}, ["b"]]
    data = DataProto.from_dict(non_tensors={"value": values})
    again = DataProto.concat([data.repeat(2), data[[1, 0]]])
    again.reorder([5, 4, 3, 2, 1, 0])
    order = [0, 1, 1, 1, 0, 0]
    assert all(
        value is values[row]
        for value, row in zip(again.non_tensor_batch["value"], order, strict=True)
    )


@pytest.mark.parametrize(("in_place", "arguments"), [("reorder", [[1, 0]]), ("padding", [2])])
def test_in_place_frees_a_key_before_the_next_is_copied(in_place: str, arguments: Any) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    counts = []

    class Watched(torch.Tensor):
        """Counts, when its rows are taken, how many of the old tensors there still are."""

        def __getitem__(self, rows: object) -> torch.Tensor:
            counts.append(sum(reference() is not None for reference in alive))
            return torch.zeros(len(rows))  # type: ignore[arg-type]

    watched = {key: torch.zeros(2).as_subclass(Watched) for key in "abc"}
    alive.extend(weakref.ref(tensor) for tensor in watched.values())
    data = DataProto.from_dict(watched)
    watched.clear()
    getattr(data, in_place)(*arguments)
    assert counts == [3, 2, 1]


def test_in_place_leaves_other_holders_alone(data: DataProto) -> None:
    batch, columns, meta = data.batch, data.non_tensor_batch, data.meta_info
    other = DataProto(batch, columns, meta)
    data.reorder([3, 2, 1, 0])
    data.rename("tokens", "ids")
    data.pop(["ids"], ["name"], ["temperature"])
    data.union(DataProto.from_dict({"new": torch.zeros(4)}, {"more": [1, 2, 3, 4]}, {"step": 1}))
    assert other.batch is not None and set(other.batch.keys()) == {"tokens", "score"}
    assert other.batch["tokens"][:, 0].tolist() == [0, 2, 4, 6]
    assert other.non_tensor_batch.keys() == {"name", "turns"}
    assert other.meta_info == {"temperature": 0.7}


@pytest.mark.parametrize("method", ["torch", "numpy"])
def test_a_row_takes_only_itself_along(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", method)
    numbers = torch.arange(400_000).view(-1, 4)
    data = DataProto.from_dict({"x": numbers}, {"n": np.arange(100_000)})
    pickled = pickle.dumps(data[7])
    assert len(pickled) < 5_000
    row = pickle.loads(pickled)
    assert row.batch["x"].tolist() == [28, 29, 30, 31]
    assert row.batch.batch_size == torch.Size([])
    assert row.non_tensor_batch == {"n": 7}


def test_copies_of_a_row(data: DataProto) -> None:
    data.meta_info["sizes"] = [1]
    row = data[1]
    shallow, deep = copy.copy(row), copy.deepcopy(row)
    assert data.batch is not None and shallow.batch is not None and deep.batch is not None
    data.batch["tokens"].zero_()
    shallow.meta_info["new"] = 1
    data.meta_info["sizes"].append(2)
    assert shallow.batch["tokens"].tolist() == [0, 0]
    assert deep.batch["tokens"].tolist() == [2, 3]
    assert "new" not in row.meta_info
    assert deep.meta_info["sizes"] == [1]
    assert shallow.non_tensor_batch == deep.non_tensor_batch == {"name": "b", "turns": 2}
