"""Groups of workers: which of their methods can be called, and how."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from caldera.errors import ConfigError, RegistryError, UnsupportedError
from caldera.protocol import DataProto
from caldera.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    Execute,
    InProcessWorkerGroup,
    LocalWorkerGroup,
    ProcessWorkerGroup,
    ResourcePool,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
    register,
)


class Doubler(Worker):
    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        self.factor = factor

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def multiply(self, data: DataProto) -> DataProto:
        assert data.batch is not None
        metrics = {"factor": self.factor}
        return DataProto.from_dict(
            {"y": data.batch["x"] * self.factor}, meta_info={"metrics": metrics}
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_factor(self, factor: int) -> int:
        self.factor = factor
        return factor

    @register(dispatch_mode=Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
    def place_of(self) -> tuple[int, int]:
        return self.rank, self.world_size

    @register()
    def fail(self) -> None:
        raise ValueError("on purpose")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def think(self, number: int) -> int:
        await asyncio.sleep(0)
        return number * self.factor

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, needs=("x", "name", "absent"))
    def keys(self, data: DataProto, other: DataProto) -> DataProto:
        assert data.batch is not None
        found = [sorted(data.batch.keys()), sorted(data.non_tensor_batch), len(other)]
        return DataProto(meta_info={"metrics": {"keys": found}})

    def hidden(self, *values: int) -> tuple[int, ...]:
        return (self.rank, *values)


class Leaver(Worker):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def close(self) -> None:
        (self.folder / str(self.rank)).touch()


def group() -> WorkerGroup:
    return LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Doubler, factor=2))


def test_a_registered_method_is_called_through_the_group() -> None:
    answer = group().multiply(DataProto.from_dict({"x": torch.tensor([1, 2, 3])}))
    assert answer.batch["y"].tolist() == [2, 4, 6]
    assert answer.meta_info == {"metrics": {"factor": [2]}}


def test_modes_decide_what_comes_back() -> None:
    workers = group()
    assert workers.world_size == 1
    assert workers.set_factor(factor=5) == [5]
    assert workers.multiply(DataProto.from_dict({"x": torch.tensor([1])})).batch["y"].item() == 5
    assert workers.place_of() == (0, 1)


def test_async_methods_are_waited_for() -> None:
    workers = group()
    assert workers.think(4) == [8]
    assert workers.think(5) == [10]


@pytest.mark.parametrize("name", ["hidden", "factor", "place", "nothing"])
def test_nothing_else_can_be_called(name: str) -> None:
    with pytest.raises(AttributeError, match=f"^Doubler registers no method '{name}'$"):
        getattr(group(), name)


def test_an_error_of_a_worker_in_this_process_is_the_callers() -> None:
    with pytest.raises(ValueError, match="on purpose"):
        group().fail()


def test_a_group_can_be_copied() -> None:
    assert copy.copy(group()).place_of() == (0, 1)


def test_a_methods_name_must_not_be_the_groups() -> None:
    class Clash(Worker):
        @register()
        def shutdown(self) -> None: ...

    with pytest.raises(RegistryError, match="Clash registers a method 'shutdown', which is one"):
        LocalWorkerGroup(ResourcePool([1]), Clash)


def test_any_method_can_be_executed(ranks: Callable[..., Any]) -> None:
    workers = ranks(Doubler)
    assert workers.execute_all_sync("hidden", [5, 6]) == [(0, 5), (1, 6)]
    assert workers.execute_all_sync("hidden", 5) == [(0, 5), (1, 5)]
    assert workers.execute_rank_zero_sync("hidden", [5, 6]) == (0, [5, 6])
    for started in (workers.execute_all("hidden", 7), workers.execute_all_async("hidden", 7)):
        assert [answer.result() for answer in started] == [(0, 7), (1, 7)]
    assert workers.execute_rank_zero("hidden", 8).result() == (0, 8)
    assert workers.execute_rank_zero_async("hidden", 8).result() == (0, 8)


def test_only_what_is_needed_is_sent(ranks: Callable[..., Any]) -> None:
    names = np.array(["a", "b"], dtype=object)
    data = DataProto.from_dict(
        {"x": torch.arange(2), "z": torch.arange(2)}, {"name": names, "other": names}, {"step": 1}
    )
    other = DataProto.from_dict({"unneeded": torch.arange(2)})
    sent = ranks(Doubler).keys(data, other).meta_info["metrics"]["keys"]
    assert sent == [[["x"], ["name"], 1]] * 2
    assert group().keys(data, other).meta_info["metrics"]["keys"] == [
        [["x", "z"], ["name", "other"], 2]  # nothing is sent: nothing is cut
    ]
    assert sorted(data.batch.keys()) == ["x", "z"]


def test_a_recipe_builds_a_worker_each_time_and_travels() -> None:
    recipe = pickle.loads(pickle.dumps(ClassWithInitArgs(Doubler, factor=7)))
    first, second = recipe(), recipe()
    assert (first.factor, second.factor) == (7, 7)
    assert first is not second
    assert recipe.cls is Doubler


def test_a_local_group_is_in_this_process_if_it_has_one_rank() -> None:
    workers = LocalWorkerGroup(ResourcePool([1]), lambda: Doubler(3), "doubler")
    assert isinstance(workers, InProcessWorkerGroup)
    assert workers.name == "doubler"
    assert workers.workers[0].factor == 3  # type: ignore[attr-defined]
    workers.shutdown()
    assert not workers.is_alive(0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_that_is_told_to_stop_is_closed(tmp_path: Path, ranks: int) -> None:
    roles = create_colocated_worker_cls({"leaver": ClassWithInitArgs(Leaver, tmp_path)})
    LocalWorkerGroup(ResourcePool([ranks]), roles).shutdown()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1"][:ranks]


@pytest.mark.parametrize("processes", [[2], [1, 1], []])
def test_one_rank_only_in_this_process(processes: list[int]) -> None:
    with pytest.raises(UnsupportedError, match=f"a group of {sum(processes)} workers"):
        InProcessWorkerGroup(ResourcePool(processes), Doubler)


def test_processes_are_on_one_node_and_have_a_recipe() -> None:
    with pytest.raises(ConfigError, match="built by a ClassWithInitArgs, got function"):
        LocalWorkerGroup(ResourcePool([2]), lambda: Doubler(3))
    with pytest.raises(UnsupportedError, match=r"on 2 nodes \[1, 1\]: it takes one"):
        LocalWorkerGroup(ResourcePool([1, 1]), ClassWithInitArgs(Doubler))
    with pytest.raises(UnsupportedError, match="on 0 nodes"):
        ProcessWorkerGroup(ResourcePool([]), ClassWithInitArgs(Doubler))


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"wants 2 GPUs, there are 1 \(trainer.n_gpus_per_node"):
        ProcessWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Doubler), device="cuda")


def test_a_dead_worker_aborts_a_watched_run(
    ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    workers = ranks(Doubler)
    workers.shutdown()
    workers._watch(0.01)
    assert sent == [(os.getpid(), signal.SIGABRT)]
