from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from operator import methodcaller

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from caldera.errors import ProtocolError
from caldera.protocol import (
    DataProto,
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)

AssertSame = Callable[[DataProto, DataProto], None]
METHODS = ["torch", "numpy"]
VARIABLE = "VERL_DATAPROTO_SERIALIZATION_METHOD"


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), (2, 0)])
def test_single_tensor_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(12).reshape(-1)[: int(np.prod(shape))].reshape(shape).to(dtype)
    back = deserialize_single_tensor(serialize_single_tensor(tensor))
    assert back.dtype == dtype and back.shape == shape
    assert torch.equal(back, tensor)


def test_single_tensor_of_any_strides_and_gradients() -> None:
    tensor = torch.arange(6.0, requires_grad=True).view(2, 3).t()
    assert torch.equal(deserialize_single_tensor(serialize_single_tensor(tensor)), tensor)


@pytest.mark.parametrize("rows", [0, 1])
def test_single_tensor_of_a_stride_that_nothing_uses(rows: int) -> None:
    tensor = torch.arange(4)[: 2 * rows : 2]
    back = deserialize_single_tensor(serialize_single_tensor(tensor))
    assert back.dtype == torch.int64 and back.tolist() == [0][:rows]


def test_read_only_buffers_are_copied() -> None:
    dtype, shape, raw = serialize_single_tensor(torch.zeros(2))
    raw.flags.writeable = False
    deserialize_single_tensor((dtype, shape, raw)).add_(1)
    assert raw.sum() == 0


def test_nested_tensordict_round_trip() -> None:
    batch = TensorDict({"inner": TensorDict({"x": torch.ones(2, 3)}, [2, 3])}, [2])
    back = deserialize_tensordict(serialize_tensordict(batch))
    assert back["inner"].batch_size == torch.Size([2, 3])
    assert torch.equal(back["inner", "x"], torch.ones(2, 3))


def test_layouts_without_a_numpy_form() -> None:
    ragged = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(ProtocolError, match=r"layout torch.jagged has no numpy form"):
        serialize_single_tensor(ragged)
    with pytest.raises(ProtocolError, match=r"'ragged' is a NestedTensor of layout torch.jagged"):
        serialize_tensordict(TensorDict({"ragged": ragged}, [2]))


@pytest.mark.parametrize("method", METHODS)
def test_pickle(
    data: DataProto, method: str, monkeypatch: pytest.MonkeyPatch, assert_same: AssertSame
) -> None:
    monkeypatch.setenv(VARIABLE, method)
    pickled = pickle.dumps(data)
    monkeypatch.delenv(VARIABLE)  # the reader need not know
    back = pickle.loads(pickled)
    assert_same(back, data)
    back.batch["new"] = torch.zeros(4)
    back.batch["tokens"].add_(1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "batch", [None, TensorDict({}, [2]), TensorDict({"x": torch.zeros(2, 0)}, [2])]
)
def test_pickle_of_empty_batches(
    batch: TensorDict | None,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    assert_same: AssertSame,
) -> None:
    monkeypatch.setenv(VARIABLE, method)
    data = DataProto(batch, {"name": np.array(["a", None], object)}, {"step": 1})
    assert_same(pickle.loads(pickle.dumps(data)), data)


@pytest.mark.parametrize("method", METHODS)
def test_a_slice_takes_only_its_rows_along(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, method)
    data = DataProto.from_dict({"x": torch.zeros(100_000, 4)})
    assert len(pickle.dumps(data[:10])) < 5_000


@pytest.mark.parametrize("method", METHODS)
def test_tensors_arrive_without_a_device_of_the_batch(
    data: DataProto, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, method)
    back = pickle.loads(pickle.dumps(data.to("cpu")))
    assert back.batch.device is None
    assert data.batch is not None and data.batch.device == torch.device("cpu")


def test_numpy_buffers_can_travel_out_of_band(
    data: DataProto, monkeypatch: pytest.MonkeyPatch, assert_same: AssertSame
) -> None:
    monkeypatch.setenv(VARIABLE, "numpy")
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) >= 2
    read_only = [bytes(buffer) for buffer in buffers]
    assert_same(pickle.loads(pickled, buffers=read_only), data)


@pytest.mark.parametrize("back", METHODS)
@pytest.mark.parametrize("there", METHODS)
def test_pickle_across_processes(
    data: DataProto,
    there: str,
    back: str,
    monkeypatch: pytest.MonkeyPatch,
    spawned_process: ProcessPoolExecutor,
    assert_same: AssertSame,
) -> None:
    monkeypatch.setenv(VARIABLE, there)
    spawned_process.submit(exec, f"import os; os.environ[{VARIABLE!r}] = {back!r}").result()
    assert data.batch is not None
    data.batch["large"] = torch.randn(4, 50_000)
    data.non_tensor_batch["mixed"] = np.array([None, {"score": float("nan")}, "c", [1]], object)
    repeated = spawned_process.submit(methodcaller("repeat", 2), data).result()
    expected = data.repeat(2)
    assert repr(repeated.non_tensor_batch.pop("mixed")) == repr(
        expected.non_tensor_batch.pop("mixed")
    )
    assert_same(repeated, expected)


def test_import_needs_no_ray(spawned_process: ProcessPoolExecutor) -> None:
    code = "import sys, caldera.protocol; assert 'ray' not in sys.modules"
    spawned_process.submit(exec, code).result()
