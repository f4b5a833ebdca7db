"""Pools of devices, and the pool of each role."""

from __future__ import annotations

import pytest

from caldera.errors import ConfigError
from caldera.single_controller import (
    ResourcePool,
    ResourcePoolManager,
    Role,
    merge_resource_pool,
    split_resource_pool,
)


def test_the_places_of_a_pool() -> None:
    pool = ResourcePool([2])
    assert (pool.max_colocate_count, pool.n_gpus_per_node) == (10, 8)
    pool.add_node(3)
    assert pool.store == [2, 3]
    assert pool.world_size == 5
    assert pool.local_world_size_list() == [2, 2, 3, 3, 3]
    assert pool.local_rank_list() == [0, 1, 0, 1, 2]
    assert pool.slots == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert pool == ResourcePool((2, 3))
    assert pool != ResourcePool([2, 3], max_colocate_count=1)
    assert repr(pool) == "ResourcePool(process_on_nodes=[2, 3])"
    assert (ResourcePool().world_size, ResourcePool().store) == (0, [])
    with pytest.raises(ConfigError, match="a node of -1 processes"):
        pool.add_node(-1)


def test_splitting_and_merging() -> None:
    pool = ResourcePool([4, 4], max_colocate_count=3)
    first, second = split_resource_pool(pool, [3, 5])
    assert (first.store, second.store) == ([3], [1, 4])
    assert second.slots == [(0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert second.local_rank_list() == [0, 0, 1, 2, 3]
    assert second.max_colocate_count == 3
    assert merge_resource_pool(second, first) == pool
    assert [part.world_size for part in split_resource_pool(pool, 2)] == [2, 2, 2, 2]


@pytest.mark.parametrize("sizes", [3, 0, [4, 3], [8, 0], [-1, 9]])
def test_what_does_not_split(sizes: int | list[int]) -> None:
    with pytest.raises(ConfigError, match="a pool of 8 processes does not split"):
        split_resource_pool(ResourcePool([8]), sizes)


def test_pools_on_the_same_devices_do_not_merge() -> None:
    first, second = split_resource_pool(ResourcePool([4]), 2)
    whole = merge_resource_pool(first, second)
    with pytest.raises(ConfigError, match="both pools have device 2 of node 0"):
        merge_resource_pool(whole, second)


def test_pools_by_name_are_on_different_devices() -> None:
    manager = ResourcePoolManager(
        {"global_pool": [2, 2], "reward_pool": [1, 2]},
        {Role.ActorRollout: "global_pool", Role.RewardModel: "reward_pool"},
    )
    manager.create_resource_pool()
    assert manager.get_resource_pool(Role.ActorRollout) == ResourcePool([2, 2])
    assert manager.get_resource_pool(Role.RewardModel).slots == [(0, 2), (1, 2), (1, 3)]
    assert manager.get_n_gpus() == 7


def test_a_role_without_a_pool() -> None:
    manager = ResourcePoolManager({"global_pool": [1]}, {Role.Critic: "elsewhere"})
    with pytest.raises(ConfigError, match=r"^role critic .* 'elsewhere' \(known pools: none\)$"):
        manager.get_resource_pool(Role.Critic)
    manager.create_resource_pool()
    with pytest.raises(ConfigError, match=r"'elsewhere' \(known pools: global_pool\)$"):
        manager.get_resource_pool(Role.Critic)
    with pytest.raises(ConfigError, match=r"^role actor_rollout is mapped to pool None"):
        manager.get_resource_pool(Role.ActorRollout)


def test_the_roles() -> None:
    assert {role.name: role.value for role in Role} == {
        "ActorRollout": "actor_rollout",
        "ActorRolloutRef": "actor_rollout_ref",
        "Critic": "critic",
        "RefPolicy": "ref",
        "RewardModel": "rm",
    }
