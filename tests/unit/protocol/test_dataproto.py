from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack

from caldera.errors import ProtocolError
from caldera.protocol import DataProto

AssertSame = Callable[[DataProto, DataProto], None]


def tensors(data: DataProto) -> dict[str, list[Any]]:
    return {} if data.batch is None else {key: t.tolist() for key, t in data.batch.items()}


# ---- construction


def test_from_single_dict() -> None:
    data = DataProto.from_single_dict(
        {"x": torch.arange(2), "uid": np.array(["a", "b"], object)}, meta_info={"step": 3}
    )
    assert tensors(data) == {"x": [0, 1]}
    assert data.non_tensor_batch["uid"].tolist() == ["a", "b"]
    assert data.meta_info == {"step": 3}
    with pytest.raises(ValueError, match="from_single_dict: 'x' is a list, neither"):
        DataProto.from_single_dict({"x": [1, 2]})  # type: ignore[dict-item]


def test_lists_become_object_columns_of_one_dimension() -> None:
    data = DataProto.from_dict(non_tensors={"pairs": [[1, 2], [3, 4]], "text": ("a", "b")})
    assert data.batch is None and len(data) == 2
    assert data.non_tensor_batch["pairs"].shape == (2,)
    assert data.non_tensor_batch["pairs"][1] == [3, 4]
    assert data.non_tensor_batch["text"].dtype == object


def test_from_dict_leaves_the_given_meta_info_alone() -> None:
    meta = {"step": 1}
    assert DataProto.from_dict(meta_info=meta, auto_padding=True).meta_info is not meta
    assert meta == {"step": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"tensors": {"a": torch.zeros(3), "b": torch.zeros(2, 5)}},
            r"tensors\['b'\] has shape \(2, 5\).*'a': \(3,\), 'b': \(2, 5\)",
        ),
        ({"tensors": {"a": torch.tensor(1)}}, r"tensors\['a'\] has shape \(\)"),
        ({"tensors": {"a": [1]}}, r"tensors\['a'\] is a list"),
        ({"non_tensors": {"a": {1}}}, r"non_tensors\['a'\] is a set"),
        ({"tensors": {"a": torch.zeros(2)}, "non_tensors": {"b": [1]}}, r"\(1,\), .* 2 rows"),
        ({"num_batch_dims": 0}, "num_batch_dims=0"),
        (
            {"tensors": {"a": torch.zeros(1, 1)}, "non_tensors": {"b": [1]}, "num_batch_dims": 2},
            "num_batch_dims=2 with 1 non-tensors",
        ),
        (
            {"tensors": {"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)}, "num_batch_dims": 2},
            r"tensors\['b'\] has shape \(2, 4\); the first 2",
        ),
    ],
)
def test_unusable_parts(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        DataProto.from_dict(**arguments)


def test_more_batch_dimensions_still_make_rows_of_the_first() -> None:
    parts = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3, 4)}
    data = DataProto.from_dict(parts, num_batch_dims=2)
    assert data.batch is not None and data.batch.batch_size == torch.Size([2])


# ---- conversion


def test_tensordict_round_trip() -> None:
    columns: dict[str, list[Any]] = {
        "mixed": ["s", {"k": [1]}, None],
        "lists": [[1, 2], [3], []],
        "arrays": [np.arange(2), np.arange(3), np.arange(0)],
    }
    meta = {"step": 4, "sizes": [1, 2, 3], "nothing": None}
    data = DataProto.from_dict({"x": torch.arange(3)}, columns, meta)
    merged = data.to_tensordict()
    assert isinstance(merged.get("mixed"), NonTensorStack)
    assert isinstance(merged.get("sizes"), NonTensorData)
    assert tensors(data) == {"x": [0, 1, 2]}, "the source keeps its own keys"

    back = DataProto.from_tensordict(merged)
    assert tensors(back) == {"x": [0, 1, 2]}
    assert back.meta_info == meta
    assert back.non_tensor_batch["mixed"].tolist() == columns["mixed"]
    assert back.non_tensor_batch["lists"].tolist() == columns["lists"]
    assert [a.tolist() for a in back.non_tensor_batch["arrays"]] == [[0, 1], [0, 1, 2], []]


@pytest.mark.parametrize("rows", [0, 2])
def test_tensordict_without_tensors(assert_same: AssertSame, rows: int) -> None:
    data = DataProto.from_dict(non_tensors={"x": ["a", "b"][:rows]}, meta_info={"m": 1})
    assert_same(DataProto.from_tensordict(data.to_tensordict()), data)


def test_tensordict_takes_a_key_once() -> None:
    data = DataProto.from_dict({"x": torch.zeros(2)}, meta_info={"x": 1})
    with pytest.raises(ProtocolError, match="to_tensordict: 'x' occurs in more than one part"):
        data.to_tensordict()


def test_to_moves_in_place(data: DataProto) -> None:
    assert data.to("meta") is data
    assert data.batch is not None and data.batch["tokens"].device.type == "meta"
    empty = DataProto()
    assert empty.to("meta") is empty


# ---- columns


def test_select(data: DataProto) -> None:
    part = data.select(["tokens"], ["name"], [])
    assert tensors(part).keys() == {"tokens"}
    assert part.non_tensor_batch.keys() == {"name"}
    assert part.meta_info == {}
    assert tensors(data).keys() == {"tokens", "score"}
    assert tensors(data.select("score")).keys() == {"score"}
    assert len(data.select(batch_keys=[])) == 4


def test_select_all_has_its_own_containers(data: DataProto, assert_same: AssertSame) -> None:
    part = data.select()
    assert_same(part, data)
    assert part.batch is not None
    part.batch["new"] = torch.zeros(4)
    part.meta_info["new"] = 1
    assert "new" not in {*tensors(data), *data.meta_info}


@pytest.mark.parametrize("deepcopy", [False, True])
def test_select_deepcopy(data: DataProto, deepcopy: bool) -> None:
    data.meta_info["sizes"] = [1]
    part = data.select(deepcopy=deepcopy)
    assert part.batch is not None
    part.batch["tokens"][0, 0] = 99
    part.non_tensor_batch["turns"][0] = 99
    part.meta_info["sizes"].append(99)
    assert (tensors(data)["tokens"][0][0] == 99) is not deepcopy
    assert (data.non_tensor_batch["turns"][0] == 99) is not deepcopy
    assert (data.meta_info["sizes"] == [1, 99]) is not deepcopy


def test_copy_module(data: DataProto, assert_same: AssertSame) -> None:
    shallow, deep = copy.copy(data), copy.deepcopy(data)
    assert data.batch is not None
    assert_same(shallow, data)
    assert_same(deep, data)
    data.batch["tokens"].zero_()
    assert tensors(shallow)["tokens"] == [[0, 0]] * 4
    assert tensors(deep)["tokens"][3] == [6, 7]


def test_pop(data: DataProto) -> None:
    popped = data.pop(["tokens"], ["name"], ["temperature"])
    assert tensors(popped) == {"tokens": [[0, 1], [2, 3], [4, 5], [6, 7]]}
    assert popped.non_tensor_batch["name"].tolist() == ["a", "b", "c", "d"]
    assert popped.meta_info == {"temperature": 0.7}
    assert tensors(data).keys() == {"score"}
    assert data.non_tensor_batch.keys() == {"turns"}
    assert data.meta_info == {}


def test_pop_of_every_tensor_keeps_the_rows(data: DataProto) -> None:
    data.pop(["tokens", "score"])
    assert len(data) == 4
    assert data.pop(non_tensor_batch_keys=["name"]).batch is None


@pytest.mark.parametrize("operation", ["select", "pop"])
def test_missing_keys(data: DataProto, operation: str) -> None:
    call = getattr(data, operation)
    with pytest.raises(ProtocolError, match=f"{operation}: batch has no key 'x' .*tokens, score"):
        call(batch_keys=["tokens", "x"])
    with pytest.raises(ProtocolError, match=f"{operation}: non_tensor_batch has no key 'x'"):
        call(non_tensor_batch_keys=["x"])
    with pytest.raises(ProtocolError, match=f"{operation}: meta_info has no key 'x'"):
        call(batch_keys=["tokens"], meta_info_keys=["x"])
    assert tensors(data).keys() == {"tokens", "score"}, "a refused pop takes nothing"
    with pytest.raises(ProtocolError, match=r"batch has no key 'x' \(known: none\)"):
        getattr(DataProto(), operation)(batch_keys=["x"])


def test_rename(data: DataProto) -> None:
    assert data.rename("tokens", "ids") is data
    assert tensors(data)["ids"][0] == [0, 1]
    data.rename(["ids", "score"], ["score", "ids"])
    assert tensors(data) == {
        "score": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "ids": [0.5, 1.5, 2.5, 3.5],
    }


def test_unusable_rename(data: DataProto) -> None:
    with pytest.raises(ProtocolError, match="rename: batch has no key 'x'"):
        data.rename("x", "y")
    with pytest.raises(ProtocolError, match=r"rename: 1 old keys .* for 2 new keys"):
        data.rename(["tokens"], ["a", "b"])
    with pytest.raises(ProtocolError, match="'tokens' to 'score', which is a key of the batch"):
        data.rename("tokens", "score")
    assert tensors(data).keys() == {"tokens", "score"}


# ---- union and concat


def test_union(data: DataProto) -> None:
    other = DataProto.from_dict(
        {"tokens": torch.arange(8).view(4, 2), "reward": torch.ones(4)},
        {"uid": [1, 2, 3, 4], "name": [*"abcd"]},
        {"temperature": 0.7, "step": 1},
    )
    assert data.union(other) is data
    assert tensors(data).keys() == {"tokens", "score", "reward"}
    assert data.non_tensor_batch.keys() == {"name", "turns", "uid"}
    assert data.meta_info == {"temperature": 0.7, "step": 1}


def test_union_with_absent_parts(data: DataProto, assert_same: AssertSame) -> None:
    expected = data.select(deepcopy=True)
    assert_same(data.union(DataProto()), expected)
    assert_same(DataProto().union(data), expected)
    joined = data.pop(["tokens", "score"]).union(data)
    assert_same(joined, expected)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (DataProto.from_dict({"x": torch.zeros(3)}), "union: 4 rows against 3 rows"),
        (DataProto.from_dict(non_tensors={"x": [1]}), "union: 4 rows against 1 rows"),
        (
            DataProto.from_dict({"tokens": torch.zeros(4, 3)}),
            r"batch\['tokens'\] differs: .*\(4, 2\) .*int64 against .*\(4, 3\) .*float32",
        ),
        (DataProto.from_dict(non_tensors={"name": [*"abcx"]}), r"non_tensor_batch\['name'\] dif"),
        (DataProto(meta_info={"temperature": 1.0}), r"meta_info\['temperature'\].*0.7 .*1.0"),
    ],
)
def test_refused_union_changes_nothing(
    data: DataProto, other: DataProto, message: str, assert_same: AssertSame
) -> None:
    other.meta_info["extra"] = 1
    before = data.select(deepcopy=True)
    with pytest.raises(ProtocolError, match=message):
        data.union(other)
    assert_same(data, before)


def test_concat(data: DataProto) -> None:
    joined = DataProto.concat([data[2:], data[:1]])
    assert tensors(joined)["tokens"] == [[4, 5], [6, 7], [0, 1]]
    assert joined.batch is not None and joined.batch["score"].dtype == torch.bfloat16
    assert joined.non_tensor_batch["name"].tolist() == ["c", "d", "a"]
    assert joined.non_tensor_batch["turns"].dtype == np.int32
    assert joined.meta_info == {"temperature": 0.7}


def test_concat_gathers_metrics() -> None:
    parts = [
        DataProto(meta_info={"metrics": {"loss": 1.0, "first": 0}, "step": 1}),
        DataProto(meta_info={"metrics": [{"loss": 2.0}, {"loss": 3.0}], "lr": 0.1}),
        DataProto(meta_info={"metrics": None}),
    ]
    assert DataProto.concat(parts).meta_info == {
        "metrics": {"loss": [1.0, 2.0, 3.0], "first": [0]},
        "step": 1,
        "lr": 0.1,
    }


def column(*values: Any) -> DataProto:
    return DataProto.from_dict(non_tensors={"c": np.array(values)})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "nothing to concatenate"),
        (
            [DataProto.from_dict({"x": torch.zeros(1)}), DataProto()],
            r"the parts \[1\] of 2 have no batch",
        ),
        (
            [DataProto.from_dict({"x": torch.zeros(1)}), DataProto.from_dict({"y": torch.ones(1)})],
            r"batch number 1 differs from number 0 in the keys \['x', 'y'\]",
        ),
        (
            [DataProto.from_dict({"x": torch.zeros(1, n)}) for n in (2, 3)],
            r"batch\['x'\] has rows of unlike shapes: \[\(1, 2\), \(1, 3\)\]",
        ),
        ([column(1), column([1, 2])], r"non_tensor_batch\['c'\] has rows of unlike shapes"),
        ([column(1), DataProto()], r"non_tensor_batch number 1 differs .*\['c'\]"),
        ([DataProto(meta_info={"a": n}) for n in (1, 2)], r"meta_info\['a'\] differs: 1 against 2"),
        ([DataProto(meta_info={"metrics": [3]})], r"meta_info\['metrics'\] holds 3"),
    ],
)
def test_unusable_concat(parts: list[DataProto], message: str) -> None:
    with pytest.raises(ProtocolError, match=f"concat: .*{message}"):
        DataProto.concat(parts)


# ---- unfolding


def test_unfold_column_chunks() -> None:
    data = DataProto.from_dict(
        {"x": torch.arange(8).view(2, 4), "y": torch.tensor([10, 20])},
        {"z": np.arange(4).reshape(2, 2), "name": ["a", "b"]},
        {"step": 1},
    )
    unfolded = data.unfold_column_chunks(2, ["x", "z"])
    assert tensors(unfolded) == {"x": [[0, 1], [2, 3], [4, 5], [6, 7]], "y": [10, 10, 20, 20]}
    assert unfolded.non_tensor_batch["z"].tolist() == [[0], [1], [2], [3]]
    assert unfolded.non_tensor_batch["name"].tolist() == ["a", "a", "b", "b"]
    assert unfolded.meta_info == {"step": 1}
    assert tensors(data.unfold_column_chunks(2)) == tensors(data.repeat(2))


def test_unusable_unfold_column_chunks(data: DataProto) -> None:
    with pytest.raises(ProtocolError, match="data has no key 'x'"):
        data.unfold_column_chunks(2, ["x"])
    with pytest.raises(ProtocolError, match=r"'tokens' of shape \(4, 2\) .* divides into 3"):
        data.unfold_column_chunks(3, ["tokens"])
    with pytest.raises(ProtocolError, match=r"'score' of shape \(4,\)"):
        data.unfold_column_chunks(2, ["score"])
