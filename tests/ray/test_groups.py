"""Calls through a RayWorkerGroup of two real actors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist

from caldera.errors import WorkerError
from caldera.protocol import DataProto, DataProtoFuture
from caldera.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    Execute,
    Worker,
    create_colocated_worker_cls,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from caldera.single_controller.ray_group import RayClassWithInitArgs, RayWorkerGroup
from caldera.single_controller.ray_pool import RayResourcePool

pytestmark = pytest.mark.ray


class Scaler(Worker):
    """Multiplies, so that every answer shows which worker gave it."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self._register_dispatch_collect_info("pair", dp_rank=0, is_collect=self.rank == 1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def facts(self) -> dict[str, Any]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE")
        facts: dict[str, Any] = {name: os.environ[name] for name in (*names, "WG_BACKEND")}
        return facts | {
            "rank": self.rank, "meeting": self.get_master_addr_port(), "folder": os.getcwd(),
            "gpu": self.get_cuda_visible_devices(), "prefix": os.environ["WG_PREFIX"],
        }  # fmt: skip

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keys(self, data: DataProto) -> list[str]:
        assert data.batch is not None
        return sorted([*data.batch.keys(), *data.non_tensor_batch])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, needs=["x", "label"])
    def keys_sent(self, data: DataProto) -> list[str]:
        return self.keys(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def overwrite(self, data: DataProto) -> float:
        assert data.batch is not None
        data.batch["x"].fill_(self.rank + 1)
        data.non_tensor_batch["number"][:] = self.rank + 1
        dist.barrier()
        return float(data.batch["x"].sum() + data.non_tensor_batch["number"].sum())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scale(self, data: DataProto) -> DataProto:
        assert data.batch is not None
        scaled = data.batch["x"] * self.factor
        return DataProto.from_dict({"y": scaled, "rank": torch.full((len(data),), self.rank)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def scale_later(self, data: DataProto) -> DataProto:
        return self.scale(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add_one(self, data: DataProto) -> DataProto:
        assert data.batch is not None
        return DataProto.from_dict({"y": data.batch["y"] + 1})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("pair"))
    def scale_together(self, data: DataProto) -> DataProto:
        return self.scale(data)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def echo(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def who(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def echo_on_zero(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def reduced(self) -> float:
        number = torch.tensor(float(self.rank + 1))
        dist.all_reduce(number)
        return float(number)


@pytest.fixture(scope="module")
def group(cluster: Any, by_value: Any) -> Iterator[RayWorkerGroup]:
    by_value(__name__)
    pool = RayResourcePool([2], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Scaler), 10), name="scalers")
    yield group
    group.shutdown()
    pool.release()


@pytest.fixture(scope="module")
def colocated(cluster: Any, by_value: Any) -> Iterator[RayWorkerGroup]:
    """Two roles in each of two detached actors, each of which has a GPU."""
    by_value(__name__)
    pool = RayResourcePool([2], use_gpu=True, max_colocate_count=1, detached=True)
    both = create_colocated_worker_cls(
        {"actor": ClassWithInitArgs(Scaler, 2), "critic": ClassWithInitArgs(Scaler, 3)}
    )
    group = RayWorkerGroup(pool, both, device_name="cpu", name_prefix="pair_", detached=True)
    yield group
    group.shutdown()
    pool.release()


def rows(count: int = 4, **more: Any) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(float(count)), **more},
        {"label": np.array([f"row {i}" for i in range(count)], dtype=object)},
    )


def test_each_rank_knows_its_place(group: RayWorkerGroup) -> None:
    facts = group.facts()
    assert [f["RANK"] for f in facts] == ["0", "1"] and [f["rank"] for f in facts] == [0, 1]
    assert [f["LOCAL_RANK"] for f in facts] == ["0", "1"]
    same = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RAY_LOCAL_WORLD_SIZE": "2"}
    for own in facts:
        assert own.items() >= {**same, "WG_BACKEND": "ray", "folder": os.getcwd()}.items()
        assert own["meeting"] == (group.master_address, group.master_port)
        assert own["prefix"] == group.name_prefix
    assert len(set(group.worker_names)) == len(group.workers) == group.world_size == 2


def test_the_ranks_can_talk(group: RayWorkerGroup) -> None:
    assert group.reduced() == [3.0, 3.0]


def test_rows_are_dealt_and_joined_in_order(group: RayWorkerGroup) -> None:
    answer = group.scale(rows(4))
    assert answer.batch["y"].tolist() == [0, 10, 20, 30]
    assert answer.batch["rank"].tolist() == [0, 0, 1, 1]


def test_padding_is_cut_off(group: RayWorkerGroup) -> None:
    odd = DataProto.from_dict({"x": torch.arange(3.0)}, auto_padding=True)
    assert group.scale(odd).batch["y"].tolist() == [0, 10, 20]


def test_peers_share_rows(group: RayWorkerGroup) -> None:
    answer = group.scale_together(rows(2))
    assert answer.batch["y"].tolist() == [0, 10]
    assert answer.batch["rank"].tolist() == [1, 1]


def test_values_are_scattered_or_broadcast(group: RayWorkerGroup) -> None:
    assert group.echo(["a", "b"]) == ["a", "b"]
    assert group.echo(["a"]) == [["a"], ["a"]]
    assert group.echo(value=[1, 2]) == [1, 2]
    assert group.who() == 0
    assert group.echo_on_zero(["a", "b"]) == ["a", "b"]
    assert ray.get(ray.put(7)) == group.echo(ray.put(7))[1] == 7
    assert group.execute_all_sync("echo", ["a", "b"]) == ["a", "b"]
    assert group.execute_rank_zero_sync("echo", "a") == "a"
    assert group.execute_rank_zero_async("echo", "a").result() == "a"


def test_every_kind_of_value_comes_back_the_same(group: RayWorkerGroup) -> None:
    sent = rows(
        2,
        half=torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        wide=torch.arange(12).reshape(2, 6)[:, ::2],
        none=torch.zeros(2, 0),
    )
    sent.meta_info["step"] = 3
    for answer in group.echo(sent):
        assert answer.meta_info == {"step": 3}
        assert answer.non_tensor_batch["label"].tolist() == ["row 0", "row 1"]
        tensors: Any = sent.batch
        for key, tensor in tensors.items():
            assert answer.batch[key].dtype == tensor.dtype
            assert torch.equal(answer.batch[key], tensor)


def test_a_worker_may_write_into_its_batch(group: RayWorkerGroup) -> None:
    data = DataProto.from_dict({"x": torch.zeros(2)}, {"number": np.zeros(2, dtype=np.int64)})
    assert group.overwrite(data) == [4.0, 8.0]  # each rank sees its own writing alone
    assert data.batch["x"].tolist() == [0, 0] and data.non_tensor_batch["number"].tolist() == [0, 0]
    answer = group.echo(data)[0]
    answer.batch["x"][0] = 5  # and so may the controller


def test_only_what_is_needed_is_sent(group: RayWorkerGroup) -> None:
    data = rows(2, unused=torch.zeros(2))
    assert group.keys(data)[1] == ["label", "unused", "x"]
    assert group.keys_sent(data) == [["label", "x"], ["label", "x"]]


def test_a_value_is_stored_once_for_all_ranks(
    group: RayWorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[Any] = []
    put = ray.put

    def store(value: Any) -> Any:
        stored.append(value)
        return put(value)

    monkeypatch.setattr(ray, "put", store)
    group.keys(rows(2))
    assert len(stored) == 1
    group.scale_together(rows(2))
    assert len(stored) == 2
    group.scale(rows(4))
    assert len(stored) == 4  # one for the rows of each rank


def test_tensors_are_not_pickled(group: RayWorkerGroup) -> None:
    """They are handed on as buffers, which Ray writes once into its object store."""
    data = rows(1000, wide=torch.zeros(1000, 50, dtype=torch.bfloat16))
    buffers: list[Any] = []
    pickled = ray.cloudpickle.dumps(data[::2], protocol=5, buffer_callback=buffers.append)
    numbers = data[::2].non_tensor_batch["label"]
    assert sum(buffer.raw().nbytes for buffer in buffers) == 500 * (4 + 100)
    assert len(pickled) < 2000 + len(ray.cloudpickle.dumps(numbers))


def test_a_future_goes_on_without_being_fetched(group: RayWorkerGroup) -> None:
    later = group.scale_later(rows(4))
    assert isinstance(later, DataProtoFuture)
    assert group.add_one(later).batch["y"].tolist() == [1, 11, 21, 31]
    assert later.get().batch["y"].tolist() == [0, 10, 20, 30]


def test_what_cannot_be_sent_leaves_the_group_usable(group: RayWorkerGroup) -> None:
    with pytest.raises(TypeError, match="pickle"):
        group.echo(["fine", (number for number in range(2))])
    assert group.who() == 0 and group.is_alive(1)


def test_roles_share_actors(colocated: Any) -> None:
    groups = colocated.spawn({"actor", "critic"})
    assert groups["actor"].scale(rows(2)).batch["y"].tolist() == [0, 2]
    assert groups["critic"].scale(rows(2)).batch["y"].tolist() == [0, 3]
    later = groups["actor"].scale_later(rows(2))
    assert groups["critic"].add_one(later).batch["y"].tolist() == [1, 3]
    colocated.fuse(["critic"])
    assert colocated.critic.scale(rows(2)).batch["y"].tolist() == [0, 3]


def test_each_rank_sees_its_own_gpu(colocated: RayWorkerGroup) -> None:
    actors = colocated.spawn(["actor"])["actor"]
    assert sorted(facts["gpu"] for facts in actors.facts()) == ["0", "1"]


def test_a_detached_group_is_found_by_its_names(colocated: RayWorkerGroup) -> None:
    assert colocated.worker_names == ["pair_WorkerDict_0:0", "pair_WorkerDict_0:1"]
    recipe = create_colocated_worker_cls({"critic": ClassWithInitArgs(Scaler, 3)})
    again = RayWorkerGroup.from_detached(
        worker_names=colocated.worker_names, ray_cls_with_init=recipe
    )
    assert again.spawn(["critic"])["critic"].scale(rows(2)).batch["y"].tolist() == [0, 3]
    with pytest.raises(WorkerError, match="no actor 'pair_WorkerDict_0:7'"):
        RayWorkerGroup.from_detached(worker_names=["pair_WorkerDict_0:7"], ray_cls_with_init=recipe)
