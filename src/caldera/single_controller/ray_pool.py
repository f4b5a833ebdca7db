"""Resource pools on a Ray cluster: which process goes to which node, and on which GPU.

A pool reserves one placement group for each of its nodes, with one bundle for each process. Ranks
are bundles in the order of their nodes' addresses, so that the same cluster gives the same ranks.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from caldera.errors import ConfigError
from caldera.single_controller import resource_pool
from caldera.single_controller._ray import ray_module
from caldera.single_controller.resource_pool import ResourcePool, Slot

logger = logging.getLogger(__name__)

STRICT_PACK = "STRICT_PACK"
WAIT_S = 300.0
"""How long a pool waits for what others hold."""
ACCELERATOR_SHARE = 0.001
"""The amount of the resource by which Ray marks a node's kind of accelerator, in a bundle."""
SECONDS_TO_LOOK = 5.0
"""How often a pool that waits looks what the cluster has."""

_held: dict[int, list[tuple[str, dict[str, float]]]] = {}
"""The reservations of this process: of each pool, by its id, nodes and amounts."""


@dataclass(frozen=True)
class Bundle:
    """The place of one rank."""

    placement_group: Any
    index: int
    node_id: str
    address: str


@dataclass(frozen=True)
class Place:
    """A rank among those on its node."""

    node: int
    number: int
    ranks_on_node: int


def places_on_nodes(bundles: Sequence[Bundle]) -> list[Place]:
    """For each rank, the number of its node, its own number there, and how many are there."""
    on_node = Counter(bundle.node_id for bundle in bundles)
    nodes = {node_id: number for number, node_id in enumerate(on_node)}
    seen: Counter[str] = Counter()
    places = []
    for bundle in bundles:
        node_id = bundle.node_id
        places.append(Place(nodes[node_id], seen[node_id], on_node[node_id]))
        seen[node_id] += 1
    return places


class RayResourcePool(ResourcePool):
    """Processes on the nodes of a Ray cluster; nothing is reserved before a group asks."""

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix or f"{secrets.token_hex(3)}_"
        self.detached = detached
        self.accelerator_type = accelerator_type
        self._groups: list[Any] | None = None

    @property
    def bundle(self) -> dict[str, float]:
        """The reservation of one process, for all the workers that share its place."""
        if not self.use_gpu:
            return {"CPU": 1}
        bundle: dict[str, float] = {"CPU": self.max_colocate_count, "GPU": 1}
        if self.accelerator_type:
            kind = self.accelerator_type.removeprefix("accelerator_type:")
            bundle[f"accelerator_type:{kind}"] = ACCELERATOR_SHARE
        return bundle

    @property
    def worker_share(self) -> dict[str, float]:
        """The part of a bundle that one worker takes."""
        share = {"num_cpus": self.bundle["CPU"] / self.max_colocate_count}
        return share | ({"num_gpus": 1 / self.max_colocate_count} if self.use_gpu else {})

    def get_placement_groups(
        self, strategy: str = STRICT_PACK, wait_s: float = WAIT_S
    ) -> list[Any]:
        """The placement groups, one a node, in the order of the nodes' addresses.

        What the cluster does not have fails at once; resources held by others are waited for.
        """
        if self._groups is None:
            self.check_capacity()
            self._reserve(strategy, wait_s)
        assert self._groups is not None
        return self._groups

    def bundles(self, strategy: str = STRICT_PACK, wait_s: float = WAIT_S) -> list[Bundle]:
        """The place of every rank, in order."""
        groups = self.get_placement_groups(strategy, wait_s)
        addresses = _addresses()
        return [
            Bundle(group, index, node_id, addresses[node_id])
            for group in groups
            for index, node_id in sorted(_nodes_of(group).items())
        ]

    def with_slots(self, slots: Sequence[Slot]) -> SubRayResourcePool:
        return SubRayResourcePool(self, {slot: (self, slot) for slot in slots})

    def release(self) -> None:
        """Give everything back; what still runs there is ended."""
        for group in self._groups or []:
            ray_module().util.remove_placement_group(group)
        self._groups = None
        _held.pop(id(self), None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(process_on_nodes={self.store}, use_gpu={self.use_gpu})"

    def check_capacity(self) -> None:
        """A node of the pool needs a node of the cluster that has as much, or more."""
        free = _left_by_this_process()
        for size in sorted(set(self.store)):
            asked = sum(1 for processes in self.store if processes >= size)
            there = sum(self._places(resources, size) for resources in free.values())
            if there < asked:
                need = _amounts(self.bundle, {k: v * size for k, v in self.bundle.items()})
                addresses = _addresses()
                listed = "; ".join(
                    f"{addresses[node_id]}: {_amounts(self.bundle, resources)}"
                    for node_id, resources in free.items()
                )
                raise ConfigError(
                    f"trainer.nnodes and trainer.n_gpus_per_node ask for {asked} nodes of {size} "
                    f"processes ({need} each); the Ray cluster has room for {there} ({listed})"
                )

    def _places(self, resources: dict[str, float], processes: int) -> int:
        """How many nodes of the pool a node of the cluster can hold."""
        return min(
            int(resources.get(name, 0) // (amount * processes))
            for name, amount in self.bundle.items()
        )

    def _reserve(self, strategy: str, wait_s: float) -> None:
        ray = ray_module()
        self._groups = [
            ray.util.placement_group(
                [self.bundle] * processes,
                strategy=strategy,
                name=f"{self.name_prefix}node_{node}",
                lifetime="detached" if self.detached else None,
            )
            for node, processes in enumerate(self.store)
        ]
        try:
            self._wait_for_room(wait_s)
        except ConfigError:
            self.release()
            raise
        _held[id(self)] = [
            (node, self.bundle) for g in self._groups for node in _nodes_of(g).values()
        ]
        addresses = _addresses()

        def place(group: Any) -> tuple[int, bytes, str]:
            node_id = _nodes_of(group)[0]
            address = ipaddress.ip_address(addresses[node_id])
            return address.version, address.packed, node_id

        self._groups.sort(key=place)

    def _wait_for_room(self, wait_s: float) -> None:
        wanted = {name: amount * self.world_size for name, amount in self.bundle.items()}
        deadline, told = time.monotonic() + wait_s, ""
        for group in self._groups or []:
            while not group.wait(max(0.0, min(SECONDS_TO_LOOK, deadline - time.monotonic()))):
                self.check_capacity()  # nodes may be gone
                state = (
                    f"{_amounts(self.bundle, wanted)} are asked for, "
                    f"{_amounts(self.bundle, ray_module().available_resources())} are free"
                )
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"trainer.ray_wait_register_center_timeout={wait_s:g}: the Ray cluster "
                        f"had no room for the run in that time ({state})"
                    )
                if state != told:
                    logger.warning("waiting for room on the Ray cluster: %s", state)
                told = state


class SubRayResourcePool(RayResourcePool):
    """Some places of other pools, which hold the reservations."""

    def __init__(self, like: RayResourcePool, places: Mapping[Slot, _PlaceOf]) -> None:
        super().__init__(
            None,
            like.use_gpu,
            like.name_prefix,
            like.max_colocate_count,
            like.detached,
            like.accelerator_type,
        )
        self.slots = list(places)
        self.places = places

    @property
    def holders(self) -> list[RayResourcePool]:
        return list({id(pool): pool for pool, _ in self.places.values()}.values())

    def get_placement_groups(
        self, strategy: str = STRICT_PACK, wait_s: float = WAIT_S
    ) -> list[Any]:
        return [g for pool in self.holders for g in pool.get_placement_groups(strategy, wait_s)]

    def bundles(self, strategy: str = STRICT_PACK, wait_s: float = WAIT_S) -> list[Bundle]:
        of_pool = {
            id(pool): dict(zip(pool.slots, pool.bundles(strategy, wait_s), strict=True))
            for pool in self.holders
        }
        return [of_pool[id(pool)][slot] for pool, slot in self.places.values()]

    def with_slots(self, slots: Sequence[Slot]) -> SubRayResourcePool:
        return SubRayResourcePool(self, {slot: self.places[slot] for slot in slots})

    def release(self) -> None:
        for pool in self.holders:
            pool.release()


_PlaceOf: TypeAlias = tuple[RayResourcePool, Slot]


def split_resource_pool(
    pool: RayResourcePool, sizes: int | Sequence[int]
) -> list[SubRayResourcePool]:
    """Pools of these numbers of processes, in order, or of one number as often as it fits."""
    parts = resource_pool.split_resource_pool(pool, sizes)
    return [part for part in parts if isinstance(part, SubRayResourcePool)]


def merge_resource_pool(first: RayResourcePool, second: RayResourcePool) -> RayResourcePool:
    """One pool of the places of both: of parts of one pool, or of two that share nothing."""
    if (first.use_gpu, first.max_colocate_count) != (second.use_gpu, second.max_colocate_count):
        raise ConfigError(f"{first!r} and {second!r} reserve different things: they do not merge")
    both = [*_places_of(first).values(), *_places_of(second).values()]
    if len({id(pool) for pool, _ in both}) == 1:
        plain = ResourcePool().with_slots(first.slots)
        slots = resource_pool.merge_resource_pool(plain, second).slots
        return SubRayResourcePool(first, {slot: (both[0][0], slot) for slot in slots})
    slots = ResourcePool([*first.store, *second.store]).slots
    return SubRayResourcePool(first, dict(zip(slots, both, strict=True)))


def check_room(pools: Sequence[RayResourcePool], driver: dict[str, float]) -> None:
    """Refuse a run whose pools and driver ask for more than the cluster has.

    What is enough in all may still not fit on the nodes: that shows when a pool is reserved.
    """
    for pool in pools:
        pool.check_capacity()
    asked = _sums([driver, *(pool.bundle for pool in pools for _ in range(pool.world_size))])
    there = _sums(_left_by_this_process().values())
    if any(there.get(name, 0) < amount for name, amount in asked.items()):
        raise ConfigError(
            f"the run asks for {_amounts(asked, asked)} (trainer.nnodes, trainer.n_gpus_per_node, "
            "the pool of a reward model, a CPU for the driver); "
            f"the Ray cluster has {_amounts(asked, there)}"
        )


def gpus_per_node() -> int:
    """The GPUs of that node of the cluster that has most of them."""
    alive = (node["Resources"] for node in ray_module().nodes() if node["Alive"])
    return int(max((resources.get("GPU", 0) for resources in alive), default=0))


def _amounts(names: Iterable[str], resources: dict[str, float]) -> str:
    """Such as "8 GPU, 24 CPU"."""
    listed = sorted(names, reverse=True)
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in listed)


def _sums(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for part in parts:
        sums |= {name: sums.get(name, 0) + amount for name, amount in part.items()}
    return sums


def _places_of(pool: RayResourcePool) -> Mapping[Slot, _PlaceOf]:
    if isinstance(pool, SubRayResourcePool):
        return pool.places
    return {slot: (pool, slot) for slot in pool.slots}


def _addresses() -> dict[str, str]:
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray_module().nodes()}


def _nodes_of(group: Any) -> dict[int, str]:
    nodes: dict[int, str] = ray_module().util.placement_group_table(group)["bundles_to_node_id"]
    return nodes


def _left_by_this_process() -> dict[str, dict[str, float]]:
    """The capacity of each node, less the reservations of this process."""
    ray = ray_module()
    left: dict[str, dict[str, float]] = {
        node["NodeID"]: dict(node["Resources"]) for node in ray.nodes() if node["Alive"]
    }
    own = [held for pool in _held.values() for held in pool]
    context = ray.get_runtime_context()
    if context.get_actor_id():  # of a driver that is an actor of the cluster
        own.append((context.get_node_id(), context.get_assigned_resources()))
    for node_id, amounts in own:
        if node_id in left:
            there = left[node_id]
            there.update({name: there.get(name, 0) - amount for name, amount in amounts.items()})
    return left
