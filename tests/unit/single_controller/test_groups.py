"""Groups of workers in this process, and the pools that they run in."""

from __future__ import annotations

import copy

import pytest
import torch

from caldera.errors import ConfigError, UnsupportedError
from caldera.protocol import DataProto
from caldera.single_controller import (
    Dispatch,
    Execute,
    LocalWorkerGroup,
    ResourcePool,
    ResourcePoolManager,
    Role,
    Worker,
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

    def hidden(self) -> None: ...


def group() -> LocalWorkerGroup:
    return LocalWorkerGroup(ResourcePool((1,)), Doubler)


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


@pytest.mark.parametrize("name", ["hidden", "factor", "place", "nothing"])
def test_nothing_else_can_be_called(name: str) -> None:
    with pytest.raises(AttributeError, match=f"^Doubler registers no method '{name}'$"):
        getattr(group(), name)


def test_an_error_of_a_worker_is_the_callers() -> None:
    with pytest.raises(ValueError, match="on purpose"):
        group().fail()


def test_a_group_can_be_copied() -> None:
    assert copy.copy(group()).place_of() == (0, 1)


@pytest.mark.parametrize("processes", [(2,), (1, 1), ()])
def test_one_process_only(processes: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match=f"a local group of {sum(processes)} processes"):
        LocalWorkerGroup(ResourcePool(processes), Doubler)


def test_pools() -> None:
    manager = ResourcePoolManager(
        {"global_pool": [8, 8], "reward_pool": [4]},
        {Role.ActorRollout: "global_pool", Role.Critic: "reward_pool"},
    )
    manager.create_resource_pool()
    assert manager.get_resource_pool(Role.ActorRollout) == ResourcePool((8, 8))
    assert manager.get_resource_pool(Role.ActorRollout).world_size == 16
    assert manager.get_resource_pool(Role.Critic).world_size == 4
    assert manager.get_n_gpus() == 20


def test_a_role_without_a_pool() -> None:
    manager = ResourcePoolManager({"global_pool": [1]}, {Role.Critic: "elsewhere"})
    with pytest.raises(ConfigError, match=r"^role critic .* 'elsewhere' \(known pools: none\)$"):
        manager.get_resource_pool(Role.Critic)
    manager.create_resource_pool()
    with pytest.raises(ConfigError, match=r"'elsewhere' \(known pools: global_pool\)$"):
        manager.get_resource_pool(Role.Critic)
    with pytest.raises(ConfigError, match=r"^role actor_rollout is mapped to pool None"):
        manager.get_resource_pool(Role.ActorRollout)
