from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch

from caldera.protocol import DataProto

AssertSame = Callable[[DataProto, DataProto], None]


def _assert_same(actual: DataProto, expected: DataProto) -> None:
    assert (actual.batch is None) == (expected.batch is None)
    if actual.batch is not None and expected.batch is not None:
        assert actual.batch.batch_size == expected.batch.batch_size
        assert set(actual.batch.keys()) == set(expected.batch.keys())
        for key, tensor in expected.batch.items():
            torch.testing.assert_close(actual.batch[key], tensor, rtol=0, atol=0, equal_nan=True)
    assert actual.non_tensor_batch.keys() == expected.non_tensor_batch.keys()
    for key, column in expected.non_tensor_batch.items():
        assert actual.non_tensor_batch[key].dtype == column.dtype
        np.testing.assert_array_equal(actual.non_tensor_batch[key], column)
    assert actual.meta_info == expected.meta_info


@pytest.fixture(scope="session")
def assert_same() -> AssertSame:
    """Compares two DataProtos bit by bit, without the package's own notion of equality."""
    return _assert_same


@pytest.fixture(scope="session")
def spawned_process() -> Iterator[ProcessPoolExecutor]:
    """One other process, started afresh; only its first use pays for the imports."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        yield pool


@pytest.fixture
def data() -> DataProto:
    """Four rows: tokens (4, 2), a bfloat16 score (4,), names and an int32 count."""
    return DataProto.from_dict(
        tensors={
            "tokens": torch.arange(8).view(4, 2),
            "score": torch.tensor([0.5, 1.5, 2.5, 3.5], dtype=torch.bfloat16),
        },
        non_tensors={"name": ["a", "b", "c", "d"], "turns": np.array([1, 2, 3, 4], np.int32)},
        meta_info={"temperature": 0.7},
    )
