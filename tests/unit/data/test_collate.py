from __future__ import annotations

import numpy as np
import pytest
import torch

from caldera.data import collate_fn
from caldera.errors import DataError


def test_tensors_are_stacked_and_the_rest_becomes_object_arrays() -> None:
    rows = [
        {"ids": torch.tensor([1, 2]), "raw": [1, 2], "info": {"a": 1}, "index": 3},
        {"ids": torch.tensor([3, 4]), "raw": [3, 4], "info": {"a": 2}, "index": 4},
    ]
    batch = collate_fn(rows)
    assert isinstance(batch["ids"], torch.Tensor)
    assert batch["ids"].tolist() == [[1, 2], [3, 4]]
    for key in ("raw", "info", "index"):
        array = batch[key]
        assert isinstance(array, np.ndarray)
        assert array.dtype == object
        assert array.shape == (2,)
        assert list(array) == [row[key] for row in rows]
    assert isinstance(batch["raw"][0], list)


def test_arrays_of_equal_shape_stay_elements() -> None:
    batch = collate_fn([{"x": np.zeros(3)}, {"x": np.ones(3)}])
    assert batch["x"].shape == (2,)
    assert isinstance(batch["x"][1], np.ndarray)


def test_rows_that_do_not_fit_together() -> None:
    with pytest.raises(DataError, match="row 1 of a batch has no 'a'"):
        collate_fn([{"a": 1}, {"b": 1}])
    with pytest.raises(DataError, match=r"row 1 of a batch has \['b'\]"):
        collate_fn([{"a": 1}, {"a": 1, "b": 1}])
    with pytest.raises(DataError, match=r"'x' of different shapes: \(2,\), \(3,\)"):
        collate_fn([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}])
    with pytest.raises(DataError, match="'x' of different shapes"):
        collate_fn([{"x": torch.zeros(2)}, {"x": [0, 0]}])
