from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from caldera.errors import ProtocolError
from caldera.protocol import DataProto

AssertSame = Callable[[DataProto, DataProto], None]


def test_disk_round_trip(data: DataProto, tmp_path: Path, assert_same: AssertSame) -> None:
    path = tmp_path / "batch.pkl"
    data[:1].save_to_disk(path)
    data.save_to_disk(str(path))
    assert_same(DataProto.load_from_disk(path), data)
    assert [*tmp_path.iterdir()] == [path]


def test_failed_save_keeps_the_old_file(data: DataProto, tmp_path: Path) -> None:
    path = tmp_path / "batch.pkl"
    data.save_to_disk(path)
    whole = path.read_bytes()
    data.meta_info["not picklable"] = lambda: None
    with pytest.raises((AttributeError, TypeError, ValueError)):
        data.save_to_disk(path)
    assert path.read_bytes() == whole
    assert [*tmp_path.iterdir()] == [path]


def test_load_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "list.pkl"
    path.write_bytes(b"\x80\x04]\x94.")
    with pytest.raises(ProtocolError, match=r"load_from_disk: .*list.pkl holds a list"):
        DataProto.load_from_disk(path)


def test_data_info(data: DataProto) -> None:
    assert data.get_data_info().splitlines() == [
        "DataProto with 4 rows",
        "batch:",
        "  tokens: (4, 2) torch.int64 on cpu",
        "  score: (4,) torch.bfloat16 on cpu",
        "non_tensor_batch:",
        "  name: (4,) object",
        "  turns: (4,) int32",
        "meta_info:",
        "  temperature: float",
    ]
    nested = TensorDict({"inner": TensorDict({"x": torch.zeros(2)}, [2])}, [2])
    assert "  inner: (2,) TensorDict" in DataProto(nested).get_data_info()


def test_print_size(capsys: pytest.CaptureFixture[str]) -> None:
    data = DataProto.from_dict({"x": torch.zeros(512, 3)}, {"y": np.zeros(512, np.int8)})
    data.print_size("rollout")
    DataProto().print_size()
    assert capsys.readouterr().out.splitlines() == [
        "rollout batch: 6 KiB, non_tensor_batch: 512 B",
        "batch: 0 B, non_tensor_batch: 0 B",
    ]


def test_print_size_counts_what_objects_hold(capsys: pytest.CaptureFixture[str]) -> None:
    DataProto.from_dict(non_tensors={"text": ["x" * (3 << 20)]}).print_size()
    assert capsys.readouterr().out == "batch: 0 B, non_tensor_batch: 3 MiB\n"
