"""Messages between processes: tensors are handed over, not copied."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from multiprocessing import resource_sharer
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from caldera.protocol import DataProto, DataProtoFuture
from caldera.single_controller.transport import dumps, keep_handovers_quiet, loads


def batch(rows: int = 1000) -> DataProto:
    names = np.array([f"row {i}" for i in range(rows)], dtype=object)
    return DataProto.from_dict({"x": torch.arange(rows * 100).view(rows, 100)}, {"name": names})


def test_both_sides_see_the_same_memory() -> None:
    data = batch()
    assert data.batch is not None
    message = dumps({"nested": [data]})
    assert len(message) < 100_000 < data.batch["x"].nbytes
    got = loads(message)["nested"][0]
    assert type(got) is DataProto
    assert got.non_tensor_batch["name"].tolist() == data.non_tensor_batch["name"].tolist()
    assert data.batch["x"].is_shared()
    got.batch["x"][3, 4] = -7
    assert data.batch["x"][3, 4] == -7


def test_what_is_shared_is_not_copied_again() -> None:
    data = batch()
    assert data.batch is not None
    loads(dumps(data))
    before = data.batch["x"].data_ptr()
    first, second = data.chunk(2)
    got = loads(dumps(second))
    assert data.batch["x"].data_ptr() == before
    assert torch.equal(got.batch["x"], data.batch["x"][500:])
    got.batch["x"][0, 0] = -1
    assert data.batch["x"][500, 0] == -1
    assert loads(dumps(first)).batch["x"].untyped_storage().nbytes() == data.batch["x"].nbytes


@pytest.mark.parametrize("serialization", ["torch", "numpy"])
def test_bytes_are_never_made_of_tensors(
    serialization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a DataProto was turned into bytes")

    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", serialization)
    monkeypatch.setattr(DataProto, "__getstate__", refuse)
    assert len(loads(dumps(batch(3)))) == 3


def test_gradients_stay_behind() -> None:
    weight = torch.ones(3, requires_grad=True)
    data = DataProto.from_dict({"y": weight * 2})
    got = loads(dumps(data))
    assert got.batch["y"].tolist() == [2, 2, 2]
    assert not got.batch["y"].requires_grad


def test_unusual_batches() -> None:
    ragged = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    inner = TensorDict({"z": torch.arange(2)}, [2])
    data = DataProto(TensorDict({"ragged": ragged, "inner": inner}, [2]), meta_info={"step": 3})
    got = loads(dumps(data))
    assert [row.tolist() for row in got.batch["ragged"].unbind()] == [[1, 1], [1, 1, 1]]
    assert got.batch["inner", "z"].tolist() == [0, 1]
    assert got.meta_info == {"step": 3}
    assert loads(dumps(DataProto())).batch is None
    assert len(loads(dumps(DataProto(TensorDict({}, [5]))))) == 5


def test_a_future_arrives_resolved() -> None:
    future = DataProtoFuture.concat([batch(2), batch(2)], getter=lambda futures: futures)
    got = loads(dumps(future))
    assert isinstance(got, DataProtoFuture)
    assert len(got.get()) == 4


def test_a_process_that_dies_while_it_fetches_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: told.append(kind))
    keep_handovers_quiet.__wrapped__()
    reader, writer = os.pipe()
    handle = resource_sharer.DupFd(writer)
    with caplog.at_level(logging.DEBUG), socket.socket(socket.AF_UNIX) as dying:
        dying.connect(resource_sharer._resource_sharer._address)  # type: ignore[attr-defined]
        dying.close()
        deadline = time.monotonic() + 10
        while "went away" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "a process went away while it fetched memory" in caplog.text
    os.write(handle.detach(), b"x")  # the others get theirs
    assert os.read(reader, 1) == b"x"
    assert told == []
    try:
        raise EOFError
    except EOFError:
        sys.excepthook(*sys.exc_info())
    assert told == [EOFError]  # of anything else it is told
