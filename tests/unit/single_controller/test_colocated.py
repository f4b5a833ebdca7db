"""Several roles in one worker."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from caldera.errors import ConfigError, ProtocolError
from caldera.protocol import DataProto
from caldera.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    Worker,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)


class Actor(Worker):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    @register(Dispatch.ONE_TO_ALL)
    def where(self) -> tuple[str, int, int]:
        return "actor", self.rank, self.step

    @register(Dispatch.ONE_TO_ALL)
    def steps_of_critic(self) -> int:
        critic = self.get_fused_worker_by_name("critic")
        assert isinstance(critic, Critic)
        return critic.steps


class Critic(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def place(self, rank: int, world_size: int) -> None:
        super().place(rank, world_size)
        self._register_dispatch_collect_info("critic", rank, True)

    @register(Dispatch.ONE_TO_ALL)
    def where(self) -> tuple[str, int]:
        return "critic", self.rank

    @register(make_nd_compute_dataproto_dispatch_fn("critic"))
    def train(self, data: DataProto) -> DataProto:
        self.steps += len(data)
        return data

    @register(Dispatch.ONE_TO_ALL)
    async def think(self) -> int:
        return self.rank


def recipe() -> ClassWithInitArgs:
    return create_colocated_worker_cls(
        {"actor": ClassWithInitArgs(Actor, step=3), "critic": ClassWithInitArgs(Critic)}
    )


def test_methods_by_role(ranks: Callable[..., Any]) -> None:
    group = ranks(recipe())
    assert group.actor_where() == [("actor", 0, 3), ("actor", 1, 3)]
    assert group.critic_where() == [("critic", 0), ("critic", 1)]
    with pytest.raises(AttributeError, match="WorkerDict registers no method 'where'"):
        group.where()


def test_a_group_for_each_role(ranks: Callable[..., Any]) -> None:
    group = ranks(recipe())
    roles = group.spawn({"actor", "critic"})
    assert sorted(roles) == ["actor", "critic"]
    actor, critic = roles["actor"], roles["critic"]
    assert (actor.name, actor.world_size, actor.worker_class) == ("actor", 2, Actor)
    assert actor.where() == [("actor", 0, 3), ("actor", 1, 3)]
    assert critic.where() == [("critic", 0), ("critic", 1)]
    assert critic.think() == [0, 1]
    answer = critic.train(DataProto.from_dict({"x": torch.arange(6)}))
    assert answer.batch["x"].tolist() == [0, 1, 2, 3, 4, 5]
    assert actor.steps_of_critic() == [3, 3]
    assert critic.execute_all_sync("where") == [("critic", 0), ("critic", 1)]
    assert critic.is_alive(1)
    critic.shutdown()
    assert not actor.is_alive(0)


def test_a_role_that_is_not_there(ranks: Callable[..., Any]) -> None:
    with pytest.raises(ProtocolError, match=r"no role 'ref' \(known: actor, critic\)$"):
        ranks(recipe()).spawn(["actor", "ref"])
    with pytest.raises(ProtocolError, match=r"Critic has no role 'ref' \(known: none\)$"):
        ranks(Critic).spawn(["ref"])
    with pytest.raises(ConfigError, match="at least one role"):
        create_colocated_worker_cls({})


def test_a_recipe_of_several_roles_travels(ranks: Callable[..., Any]) -> None:
    group = ranks(pickle.loads(pickle.dumps(recipe())))
    assert group.spawn(["actor"])["actor"].where() == [("actor", 0, 3), ("actor", 1, 3)]
    assert create_colocated_worker_cls_fused is create_colocated_worker_cls
