"""Places on a Ray cluster: what is reserved, in which order, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Timer
from typing import Any

import pytest
import ray

from caldera.errors import ConfigError
from caldera.single_controller import ray_pool
from caldera.single_controller.ray_pool import (
    RayResourcePool,
    check_room,
    gpus_per_node,
    merge_resource_pool,
    places_on_nodes,
    split_resource_pool,
)

pytestmark = pytest.mark.ray
MakePool = Callable[..., RayResourcePool]


@pytest.fixture
def make_pool(cluster: Any) -> Iterator[MakePool]:
    made = []

    def make(*args: Any, **options: Any) -> RayResourcePool:
        made.append(RayResourcePool(*args, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.release()


def test_a_bundle_has_room_for_all_that_share_it() -> None:
    on_gpus = RayResourcePool([8, 8], max_colocate_count=3)
    assert on_gpus.bundle == {"CPU": 3, "GPU": 1}
    assert on_gpus.worker_share == {"num_cpus": 1, "num_gpus": pytest.approx(1 / 3)}
    assert (on_gpus.world_size, on_gpus.store) == (16, [8, 8])
    on_cpus = RayResourcePool([2], use_gpu=False)
    assert on_cpus.bundle == {"CPU": 1}
    assert on_cpus.worker_share == {"num_cpus": 0.1}
    kind = RayResourcePool([1], max_colocate_count=1, accelerator_type="H200")
    assert kind.bundle == {"CPU": 1, "GPU": 1, "accelerator_type:H200": 0.001}


def has_free(cpus: int) -> Callable[[], bool]:
    """Ray tells of what was taken or given back a little later."""
    return lambda: ray.available_resources().get("CPU", 0) == cpus


def test_ranks_have_bundles_of_their_own(make_pool: MakePool, wait_for: Any) -> None:
    pool = make_pool([2, 1], use_gpu=False)
    bundles = pool.bundles()
    assert [bundle.address for bundle in bundles] == [ray.util.get_node_ip_address()] * 3
    assert len({(bundle.placement_group.id, bundle.index) for bundle in bundles}) == 3
    # Two groups of bundles that Ray put on one node: the ranks are told what is so.
    assert [(p.node, p.number, p.ranks_on_node) for p in places_on_nodes(bundles)] == [
        (0, 0, 3),
        (0, 1, 3),
        (0, 2, 3),
    ]
    wait_for(has_free(1), "three of the four CPUs are reserved")
    pool.release()
    assert pool.bundles()  # reserved anew


def test_parts_of_a_pool_share_its_reservation(make_pool: MakePool) -> None:
    pool = make_pool([3], use_gpu=False)
    first, second = split_resource_pool(pool, [1, 2])
    assert (first.world_size, second.world_size) == (1, 2)
    assert [*first.bundles(), *second.bundles()] == pool.bundles()
    assert merge_resource_pool(first, second).bundles() == pool.bundles()
    assert [part.world_size for part in split_resource_pool(pool, 1)] == [1, 1, 1]
    with pytest.raises(ConfigError, match="3 processes does not split"):
        split_resource_pool(pool, 2)


def test_pools_of_their_own_are_merged(make_pool: MakePool) -> None:
    first, second = make_pool([1], use_gpu=False), make_pool([2], use_gpu=False)
    merged = merge_resource_pool(first, second)
    assert merged.world_size == 3
    assert merged.bundles() == [*first.bundles(), *second.bundles()]
    with pytest.raises(ConfigError, match="different things"):
        merge_resource_pool(first, make_pool([1]))


@pytest.mark.parametrize(
    ("processes", "options", "message"),
    [
        ([3], {}, r"1 nodes of 3 processes \(3 GPU, 3 CPU each\).*room for 0 \(.*2 GPU, 4 CPU"),
        ([2, 2], {}, r"2 nodes of 2 processes \(2 GPU, 2 CPU each\).*room for 1"),
        ([5], {"use_gpu": False}, r"1 nodes of 5 processes \(5 CPU each\).*room for 0 \(.*4 CPU"),
        ([1], {"accelerator_type": "none"}, "room for 0"),
    ],
)
def test_more_than_the_cluster_has_is_refused(
    make_pool: MakePool, processes: list[int], options: dict[str, Any], message: str
) -> None:
    pool = make_pool(processes, max_colocate_count=1, **options)
    with pytest.raises(ConfigError, match=message) as error:
        pool.bundles()
    assert "trainer.nnodes and trainer.n_gpus_per_node" in str(error.value)


def test_what_this_process_holds_is_not_waited_for(make_pool: MakePool) -> None:
    make_pool([3], use_gpu=False).bundles()
    with pytest.raises(ConfigError, match=r"2 CPU each\).*room for 0 \(.*1 CPU\)"):
        make_pool([2], use_gpu=False).bundles()


def test_what_others_hold_is_waited_for(make_pool: MakePool, wait_for: Any) -> None:
    other = ray.util.placement_group([{"CPU": 3}])
    assert other.wait(60)
    wait_for(has_free(1), "three of the four CPUs are reserved")
    pool = make_pool([2], use_gpu=False)
    with pytest.raises(ConfigError, match="2 CPU are asked for, 1 CPU are free"):
        pool.bundles(wait_s=0.5)
    ray.util.remove_placement_group(other)
    assert len(pool.bundles(wait_s=60)) == 2


def test_a_pool_does_not_wait_for_a_node_that_is_gone(
    cluster: Any, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_pool, "SECONDS_TO_LOOK", 0.5)
    second = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes(120)
    other = ray.util.placement_group([{"CPU": 4}])
    assert other.wait(60)
    removal = Timer(1, cluster.remove_node, [second])
    removal.start()
    try:
        with pytest.raises(ConfigError, match=r"3 nodes of 2 processes .* room for 2 \("):
            make_pool([2, 2, 2], use_gpu=False).bundles()
    finally:
        removal.join()
        ray.util.remove_placement_group(other)


def test_a_run_must_fit_in_all(make_pool: MakePool) -> None:
    pools = [make_pool([2], use_gpu=False), make_pool([1], use_gpu=False)]
    check_room(pools, {"CPU": 1})
    with pytest.raises(ConfigError, match=r"asks for 5 CPU \(.*\); the Ray cluster has 4 CPU$"):
        check_room(pools, {"CPU": 2})
    with pytest.raises(ConfigError, match=r"asks for 1 GPU, 5 CPU \(.*\); .* has 2 GPU, 4 CPU$"):
        check_room([*pools, make_pool([1], max_colocate_count=1)], {"CPU": 1})


def test_gpus_of_a_node_are_counted(cluster: Any) -> None:
    assert gpus_per_node() == 2
