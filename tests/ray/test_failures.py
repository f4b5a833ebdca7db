"""What a person sees when a rank on a Ray cluster fails, and that nothing of the group remains."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from caldera.errors import WorkerError
from caldera.single_controller import ClassWithInitArgs, Dispatch, Worker, register
from caldera.single_controller.ray_failure import look_at_all
from caldera.single_controller.ray_group import RayWorkerGroup
from caldera.single_controller.ray_pool import RayResourcePool

pytestmark = pytest.mark.ray
MakeGroup = Callable[..., RayWorkerGroup]


class Fragile(Worker):
    def __init__(self, broken_rank: int | None = None) -> None:
        super().__init__()
        if self.rank == broken_rank:
            raise OSError("no such model")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process(self) -> tuple[int, str]:
        return os.getpid(), ray.get_runtime_context().get_node_id()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_on_one(self) -> None:
        dist.barrier()  # both are in the call before one of them fails
        if self.rank == 1:
            raise ValueError("rank one has had enough")
        dist.all_reduce(torch.zeros(1))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_on_one(self) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(1))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def miss_a_collective(self) -> None:
        if self.rank == 1:
            time.sleep(600)
        dist.all_reduce(torch.zeros(1))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def wait_for_ever(self) -> None:
        time.sleep(600)


@pytest.fixture
def make_group(cluster: Any, by_value: Any) -> Iterator[MakeGroup]:
    by_value(__name__)
    made: list[Any] = []

    def make(pool: RayResourcePool | None = None, *args: Any, **options: Any) -> RayWorkerGroup:
        own = pool or RayResourcePool([2], use_gpu=False)
        made.append(own)
        recipe = ClassWithInitArgs(Fragile, *args)
        return RayWorkerGroup(own, recipe, device_name="cpu", name="fragile", **options)

    yield make
    for pool in made:
        pool.release()


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises(WorkerError) as error:
        call()
    return str(error.value)


def assert_ended(group: RayWorkerGroup, processes: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in processes):
        assert time.monotonic() < deadline, "a process of the group is still there"
        time.sleep(0.1)
    assert not any(group.is_alive(rank) for rank in range(group.world_size))
    with pytest.raises(WorkerError, match="fragile was ended after a failure"):
        group.process()


def test_an_exception_while_another_rank_waits_for_it(make_group: MakeGroup) -> None:
    group = make_group()
    processes = [pid for pid, _ in group.process()]
    message = message_of(group.fail_on_one)
    assert "worker group fragile: rank 1 of 2 failed in fail_on_one" in message
    assert "ValueError: rank one has had enough" in message
    assert 'raise ValueError("rank one has had enough")' in message
    waiting = message[message.index("rank 0 was still in fail_on_one") :]
    assert "in all_reduce" in waiting and "in fail_on_one" in waiting
    assert "ray/_private" not in message and "ray_actor.py" not in message
    logs = [line.removeprefix("  log: ") for line in message.splitlines() if "  log: " in line]
    assert len(logs) == 2 and all(Path(log).is_file() for log in logs)
    assert "rank one has had enough" in Path(logs[0]).read_text()
    assert len(message.splitlines()) < 30
    assert_ended(group, processes)


def test_a_killed_worker_is_the_first_to_blame(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayWorkerGroup, "grace_s", 60.0)  # until the other rank has failed as well
    group = make_group()
    processes = [pid for pid, _ in group.process()]
    message = message_of(group.die_on_one)
    assert "worker group fragile: rank 1 of 2 failed in die_on_one" in message
    assert "its process was killed, or crashed" in message
    assert "rank 0 failed in die_on_one as well" in message
    assert_ended(group, processes)


def test_a_rank_for_which_others_wait(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayWorkerGroup, "long_grace_s", 1.0)
    group = make_group(timeout_s=10, ray_wait_register_center_timeout=60)
    processes = [pid for pid, _ in group.process()]
    blamed, _, waiting = message_of(group.miss_a_collective).partition("rank 0 failed in")
    assert "worker group fragile: rank 1 of 2 failed in miss_a_collective" in blamed
    assert "no answer, while others waited for it in a collective" in blamed
    assert "in miss_a_collective" in blamed.splitlines()[2] and "  log: /" in blamed
    assert "Timed out waiting 10000ms" in waiting and "  log: /" in waiting
    assert_ended(group, processes)


def test_a_worker_that_cannot_be_built(make_group: MakeGroup) -> None:
    message = message_of(lambda: make_group(None, 1))
    assert "rank 1 of 2 failed in __init__" in message and "OSError: no such model" in message


def test_ranks_on_two_nodes_and_a_node_that_disappears(
    cluster: Any, make_group: MakeGroup, wait_for: Any
) -> None:
    # One GPU of the first node is taken, so that a rank goes to each node.
    taken = RayResourcePool([1], max_colocate_count=1)
    taken.bundles()
    second = cluster.add_node(num_cpus=1, num_gpus=1)
    cluster.wait_for_nodes(120)

    def both_wait() -> bool:  # on this node and on the other
        stacks = [sight.stack for sight in look_at_all(group._locations).values()]
        return all(stack and "in wait_for_ever" in stack[-1] for stack in stacks)

    try:
        group = make_group(RayResourcePool([1, 1], max_colocate_count=1))
        nodes = [node_id for _, node_id in group.process()]
        assert len(set(nodes)) == 2 and nodes == sorted(nodes)  # of one address: by their ids
        far = nodes.index(second.node_id)
        pending = group.wait_for_ever()
        wait_for(both_wait, "a rank does not show its stack")
        cluster.remove_node(second)
        message = message_of(pending[1 - far].result)  # though the other one is awaited
    finally:
        taken.release()
    assert f"rank {far} of 2 failed in wait_for_ever" in message
    assert "its node has died" in message
    near = message[message.index(f"rank {1 - far} was still in wait_for_ever") :]
    assert "in wait_for_ever" in near.splitlines()[1]
