from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from caldera.errors import ProtocolError
from caldera.protocol import (
    DataProto,
    DataProtoItem,
    all_gather_data_proto,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)

AssertSame = Callable[[DataProto, DataProto], None]


def test_pad_cycles_from_the_start(data: DataProto, assert_same: AssertSame) -> None:
    padded, pad_size = pad_dataproto_to_divisor(data, 7)
    assert pad_size == 3
    assert "".join(padded.non_tensor_batch["name"]) == "abcdabc"
    assert_same(unpad_dataproto(padded, pad_size), data)

    padded, pad_size = pad_dataproto_to_divisor(data[:2], 7)
    assert pad_size == 5
    assert "".join(padded.non_tensor_batch["name"]) == "abababa"


def test_pad_by_nothing(data: DataProto) -> None:
    padded, pad_size = pad_dataproto_to_divisor(data, 2)
    assert padded is data and pad_size == 0
    assert unpad_dataproto(data, 0) is data
    assert len(unpad_dataproto(data, 4)) == 0
    assert pad_dataproto_to_divisor(DataProto(), 3)[1] == 0


def test_unusable_pad(data: DataProto) -> None:
    with pytest.raises(ProtocolError, match="size_divisor=0"):
        pad_dataproto_to_divisor(data, 0)
    with pytest.raises(ProtocolError, match="cannot take 5 rows off 4 rows"):
        unpad_dataproto(data, 5)
    with pytest.raises(ProtocolError, match="cannot take -1 rows"):
        unpad_dataproto(data, -1)


def test_fold_and_unfold(data: DataProto, assert_same: AssertSame) -> None:
    folded = fold_batch_dim(data, 2)
    assert folded.batch is not None and folded.batch.batch_size == torch.Size([2])
    assert folded.batch["tokens"].tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert folded.batch["score"].shape == (2, 2)
    assert folded.non_tensor_batch["name"].tolist() == [["a", "b"], ["c", "d"]]
    assert_same(unfold_batch_dim(folded), data)


def test_unfold_three_dimensions() -> None:
    data = DataProto.from_dict({"x": torch.arange(24).view(2, 3, 2, 2)}, num_batch_dims=3)
    unfolded = unfold_batch_dim(data, 3)
    assert unfolded.batch is not None
    assert unfolded.batch["x"].shape == (12, 2)
    assert unfolded.batch["x"].flatten().tolist() == [*range(24)]


def test_unusable_fold(data: DataProto) -> None:
    with pytest.raises(ProtocolError, match="4 rows do not fold into 3"):
        fold_batch_dim(data, 3)
    with pytest.raises(ProtocolError, match=r"unfold_batch_dim: data\['score'\] has shape \(4,\)"):
        unfold_batch_dim(data, 2)
    with pytest.raises(ProtocolError, match="batch_dims=0"):
        unfold_batch_dim(data, 0)


def test_collate_stacks_rows(data: DataProto) -> None:
    stacked = collate_fn([data[2], data[0]])
    assert stacked.batch is not None
    assert stacked.batch["tokens"].tolist() == [[4, 5], [0, 1]]
    assert stacked.batch["score"].dtype == torch.bfloat16
    assert stacked.non_tensor_batch["name"].tolist() == ["c", "a"]
    assert stacked.non_tensor_batch["turns"].dtype == object
    assert stacked.meta_info == {"temperature": 0.7}


def test_collate_keeps_lists_as_values() -> None:
    rows = [DataProtoItem(non_tensor_batch={"pair": [n, n]}) for n in range(2)]
    assert collate_fn(rows).non_tensor_batch["pair"].shape == (2,)


def test_unusable_collate(data: DataProto) -> None:
    with pytest.raises(ProtocolError, match="no rows to stack"):
        collate_fn([])
    with pytest.raises(ProtocolError, match="only 1 of 2 rows have tensors"):
        collate_fn([data[0], DataProtoItem()])
    with pytest.raises(ProtocolError, match=r"collate_fn: row number 1 .*\['score'\]"):
        collate_fn([data[0], data.select(["tokens"])[0]])
    with pytest.raises(ProtocolError, match=r"number 1 differs .*\['name'\]"):
        collate_fn([data[0], data.select(non_tensor_batch_keys=["turns"])[0]])
    with pytest.raises(ProtocolError, match=r"meta_info\['temperature'\] differs"):
        cold = DataProtoItem(data[0].batch, data[0].non_tensor_batch, {"temperature": 0.0})
        collate_fn([data[0], cold])


SECOND_RANK = """
import torch, torch.distributed as dist
from caldera.protocol import DataProto, all_gather_data_proto

dist.init_process_group("gloo", init_method=rendezvous, rank=1, world_size=2)
data = DataProto.from_dict(
    {"x": torch.tensor([[3.0, 3.5]], dtype=torch.bfloat16), "done": torch.tensor([True])},
    {"name": ["c"]},
    {"rank": 1},
)
all_gather_data_proto(data)
data.save_to_disk(output)
for unlike in ({"y": torch.zeros(1)}, {"x": torch.zeros(1, 3)}):
    try:
        all_gather_data_proto(DataProto.from_dict(unlike))
    except ValueError:
        continue
    raise AssertionError(f"{unlike} was gathered")
all_gather_data_proto(DataProto.from_dict(non_tensors={"name": []}))
all_gather_data_proto(DataProto.from_dict({"x": torch.zeros(0, 2)}))
dist.destroy_process_group()
"""


def test_all_gather(
    spawned_process: ProcessPoolExecutor, tmp_path: Path, assert_same: AssertSame
) -> None:
    rendezvous, output = f"file://{tmp_path / 'rendezvous'}", tmp_path / "output"
    names = {"rendezvous": rendezvous, "output": output}
    second_rank = spawned_process.submit(exec, SECOND_RANK, names)
    dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=2)
    try:
        data = DataProto.from_dict(
            {
                "done": torch.tensor([False, True]),
                "x": torch.tensor([[1.0, 1.5], [2.0, 2.5]], dtype=torch.bfloat16),
            },
            {"name": ["a", "b"]},
            {"rank": 0},
        )
        all_gather_data_proto(data)
        assert data.batch is not None and data.batch["x"].dtype == torch.bfloat16
        assert data.batch["x"].tolist() == [[1.0, 1.5], [2.0, 2.5], [3.0, 3.5]]
        assert data.batch["done"].tolist() == [False, True, True]
        assert data.non_tensor_batch["name"].tolist() == ["a", "b", "c"]
        assert data.meta_info == {"rank": 0}

        with pytest.raises(ProtocolError, match=r"rank 1 holds .*'y'.*rank 0 .*'x'"):
            all_gather_data_proto(DataProto.from_dict({"x": torch.zeros(1)}))
        with pytest.raises(ProtocolError, match=r"rank 1 holds .*\(3,\).*rank 0 .*\(2,\)"):
            all_gather_data_proto(DataProto.from_dict({"x": torch.zeros(1, 2)}))
        only_names = DataProto.from_dict(non_tensors={"name": ["z"]})
        all_gather_data_proto(only_names)
        assert only_names.non_tensor_batch["name"].tolist() == ["z"]
        no_rows = DataProto.from_dict({"x": torch.zeros(0, 2)})
        all_gather_data_proto(no_rows)
        assert no_rows.batch is not None and no_rows.batch["x"].shape == (0, 2)

        second_rank.result(timeout=60)
        other = DataProto.load_from_disk(output)
        assert other.meta_info.pop("rank") == 1 and data.meta_info.pop("rank") == 0
        assert_same(other, data)
    finally:
        dist.destroy_process_group()


def test_all_gather_takes_plain_tensors_only() -> None:
    nested = TensorDict({"inner": TensorDict({"x": torch.zeros(2)}, [2])}, [2])
    with pytest.raises(ProtocolError, match=r"batch\['inner'\] is a TensorDict, not a tensor"):
        all_gather_data_proto(DataProto(nested, {"n": np.zeros(2)}))
