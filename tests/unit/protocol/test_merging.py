from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from caldera.errors import ProtocolError
from caldera.protocol import list_of_dict_to_dict_of_list, union_numpy_dict, union_tensor_dict
from caldera.protocol.merging import deep_equal, union_dict

NAN = float("nan")


def objects(*values: Any) -> np.ndarray[Any, Any]:
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 1.0),
        (NAN, np.float64(NAN)),
        ([1, [NAN]], [1, [-NAN]]),
        ({"a": (1, NAN)}, {"a": (1, np.float32(NAN))}),
        (np.array([1.0, NAN]), np.array([1.0, NAN])),
        (np.array(["a", "b"]), np.array(["a", "b"])),
        (np.array([1, 2]), objects(1, 2)),
        (objects({"a": np.array([NAN])}, None), objects({"a": np.array([NAN])}, None)),
        (torch.ones(2), torch.ones(2)),
        (
            TensorDict({"a": TensorDict({"b": torch.ones(2)}, [2])}, [2]),
            TensorDict({"a": TensorDict({"b": torch.ones(2)}, [2])}, [2]),
        ),
    ],
)
def test_equal(left: Any, right: Any) -> None:
    assert deep_equal(left, right) and deep_equal(right, left)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 2),
        (NAN, 0.0),
        (NAN, None),
        ([1], (1,)),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        (np.array([1, 2]), [1, 2]),
        (np.array([1, 2]), np.array([[1, 2]])),
        (np.array([1.0, NAN]), np.array([NAN, 1.0])),
        (np.array(["a", "b"]), np.array([1, 2])),
        (objects([NAN, 1]), objects([NAN, 2])),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), np.ones(2)),
        (torch.tensor([NAN]), torch.tensor([NAN])),
        (TensorDict({"b": torch.ones(2)}, [2]), TensorDict({"b": torch.zeros(2)}, [2])),
    ],
)
def test_unequal(left: Any, right: Any) -> None:
    assert not deep_equal(left, right) and not deep_equal(right, left)


def test_one_tensor_equals_itself_even_with_nan() -> None:
    tensor = torch.tensor([NAN])
    assert deep_equal(tensor, tensor)


def test_views_of_the_same_memory_are_equal_even_with_nan() -> None:
    tensor = torch.tensor([[NAN, 1.0], [2.0, 3.0]])
    assert deep_equal(tensor[:1], tensor[:1])
    assert not deep_equal(tensor[:1], tensor[:1].clone())
    assert not deep_equal(tensor[0], tensor[:, 0]), "same start and shape, other strides"
    column = objects(object(), object())
    assert deep_equal(column[:], column[:])
    assert not deep_equal(column, column[::-1])


def test_ragged_tensors() -> None:
    def ragged(*rows: list[int]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([*map(torch.tensor, rows)], layout=torch.jagged)

    assert deep_equal(ragged([1], [2, 3]), ragged([1], [2, 3]))
    assert not deep_equal(ragged([1], [2, 3]), ragged([1, 2], [3]))
    assert not deep_equal(ragged([1], [2, 3]), ragged([1]))
    assert not deep_equal(ragged([1], [2]), torch.tensor([[1], [2]]))


def test_union_tensor_dict() -> None:
    left = TensorDict({"a": torch.ones(2), "b": torch.zeros(2)}, [2])
    right = TensorDict({"b": torch.zeros(2), "c": torch.ones(2)}, [2])
    merged = union_tensor_dict(left, right)
    assert {key: value.tolist() for key, value in merged.items()} == {
        "a": [1, 1],
        "b": [0, 0],
        "c": [1, 1],
    }
    assert set(left.keys()) == {"a", "b"}


def test_refused_union_tensor_dict() -> None:
    left = TensorDict({"a": torch.ones(2)}, [2])
    with pytest.raises(ProtocolError, match=r"batch sizes \(2,\) and \(3,\) differ"):
        union_tensor_dict(left, TensorDict({}, [3]))
    with pytest.raises(ProtocolError, match=r"batch\['a'\] differs: Tensor of shape \(2,\)"):
        union_tensor_dict(left, TensorDict({"a": torch.zeros(2)}, [2]))


def test_union_numpy_dict_with_nan_inside_objects() -> None:
    left = {"info": objects({"score": NAN, "tags": ["a"]}, {"score": 1.0, "tags": []})}
    right = {
        "info": objects({"score": NAN, "tags": ["a"]}, {"score": 1.0, "tags": []}),
        "reward": np.array([NAN, 1.0]),
    }
    assert union_numpy_dict(left, right).keys() == {"info", "reward"}
    assert left.keys() == {"info"}
    right["info"][0]["score"] = 0.0
    with pytest.raises(ProtocolError, match=r"\['info'\] differs: ndarray of shape \(2,\)"):
        union_numpy_dict(left, right)


def test_union_numpy_dict_takes_arrays_only() -> None:
    with pytest.raises(ProtocolError, match="'b' is a list, not a numpy array"):
        union_numpy_dict({"a": np.zeros(1)}, {"b": [1]})  # type: ignore[dict-item]


def test_long_values_are_shortened_in_errors() -> None:
    with pytest.raises(ProtocolError) as error:
        union_dict({"k": "x" * 1000}, {"k": "y"}, "union", "meta_info")
    assert len(str(error.value)) < 130


def test_list_of_dict_to_dict_of_list() -> None:
    assert list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"b": 4, "a": 3}]) == {
        "a": [1, 3],
        "b": [2, 4],
    }
    assert list_of_dict_to_dict_of_list([]) == {}
    with pytest.raises(ProtocolError, match=r"number 1 differs from number 0 in the keys \['b'\]"):
        list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"a": 3}])
