"""Resource pools: which role runs on which devices."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from caldera.errors import ConfigError

Slot: TypeAlias = tuple[int, int]
"""The place of one rank: number of the node, number of the device on it."""


class Role(Enum):
    ActorRollout = "actor_rollout"
    ActorRolloutRef = "actor_rollout_ref"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"


class ResourcePool:
    """How many processes, one for each device, there are on each node."""

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        max_colocate_count: int = 10,
        n_gpus_per_node: int = 8,
    ) -> None:
        self.max_colocate_count = max_colocate_count
        """How many groups may share a device."""
        self.n_gpus_per_node = n_gpus_per_node
        self.slots: list[Slot] = []
        """The place of every rank."""
        for count in process_on_nodes or ():
            self.add_node(count)

    def add_node(self, process_count: int) -> None:
        """One more node, with that many processes."""
        if process_count < 0:
            raise ConfigError(f"a node of {process_count} processes")
        node = max((node for node, _ in self.slots), default=-1) + 1
        self.slots += [(node, device) for device in range(process_count)]

    @property
    def world_size(self) -> int:
        return len(self.slots)

    @property
    def store(self) -> list[int]:
        """The number of processes on each node."""
        return list(Counter(node for node, _ in self.slots).values())

    def local_world_size_list(self) -> list[int]:
        """For each rank, the number of ranks on its node."""
        on_node = Counter(node for node, _ in self.slots)
        return [on_node[node] for node, _ in self.slots]

    def local_rank_list(self) -> list[int]:
        """For each rank, its number among the ranks on its node."""
        seen: Counter[int] = Counter()
        numbers = []
        for node, _ in self.slots:
            numbers.append(seen[node])
            seen[node] += 1
        return numbers

    def with_slots(self, slots: Sequence[Slot]) -> ResourcePool:
        """A pool of the same kind on these places."""
        pool = ResourcePool(None, self.max_colocate_count, self.n_gpus_per_node)
        pool.slots = list(slots)
        return pool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ResourcePool) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __repr__(self) -> str:
        return f"ResourcePool(process_on_nodes={self.store})"


def split_resource_pool(pool: ResourcePool, sizes: int | Sequence[int]) -> list[ResourcePool]:
    """Pools of these numbers of processes, in order, or of one number as often as it fits."""
    world_size = pool.world_size
    if isinstance(sizes, int):
        if sizes < 1 or world_size % sizes:
            raise ConfigError(f"a pool of {world_size} processes does not split by {sizes}")
        sizes = [sizes] * (world_size // sizes)
    if sum(sizes) != world_size or any(size < 1 for size in sizes):
        raise ConfigError(f"a pool of {world_size} processes does not split into {list(sizes)}")
    ends = itertools.accumulate(sizes)
    return [
        pool.with_slots(pool.slots[end - size : end]) for end, size in zip(ends, sizes, strict=True)
    ]


def merge_resource_pool(first: ResourcePool, second: ResourcePool) -> ResourcePool:
    """One pool of the places of both, which must not overlap."""
    shared = sorted(set(first.slots) & set(second.slots))
    if shared:
        node, device = shared[0]
        raise ConfigError(f"both pools have device {device} of node {node}: they cannot be merged")
    return first.with_slots(sorted(first.slots + second.slots))


@dataclass
class ResourcePoolManager:
    """Pools by name, such as {"global_pool": [8, 8]}, on different devices, and each role's."""

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    resource_pool_dict: dict[str, ResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Make the pools."""
        taken: Counter[int] = Counter()
        for name, processes in self.resource_pool_spec.items():
            pool = ResourcePool(processes)
            self.resource_pool_dict[name] = pool.with_slots(
                [(node, taken[node] + device) for node, device in pool.slots]
            )
            taken.update(node for node, _ in pool.slots)

    def get_resource_pool(self, role: Role) -> ResourcePool:
        name = self.mapping.get(role)
        if name not in self.resource_pool_dict:
            known = ", ".join(self.resource_pool_dict) or "none"
            raise ConfigError(
                f"role {role.value} is mapped to pool {name!r} (known pools: {known})"
            )
        return self.resource_pool_dict[name]

    def get_n_gpus(self) -> int:
        return sum(sum(processes) for processes in self.resource_pool_spec.values())
