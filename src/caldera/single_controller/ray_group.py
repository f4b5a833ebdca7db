"""RayWorkerGroup: one Ray actor a rank, on any nodes of a cluster, with torch.distributed between.

The actors are all of one class, `RankActor`, which holds the worker. Whatever happens to one of
them ends the group with the same screen as that of a local one.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch

from caldera.errors import ConfigError, WorkerError
from caldera.single_controller._ray import ray_module
from caldera.single_controller.decorator import Arguments
from caldera.single_controller.dispatching import Pending
from caldera.single_controller.failure import FailingGroup, RankFailure, WaitingRank, worker_error
from caldera.single_controller.process_main import START
from caldera.single_controller.ray_actor import (
    Location,
    RankActor,
    RankSettings,
    send_batches_as_arrays,
)
from caldera.single_controller.ray_failure import reason_of, tell
from caldera.single_controller.ray_pool import (
    STRICT_PACK,
    Bundle,
    Place,
    RayResourcePool,
    places_on_nodes,
)
from caldera.single_controller.worker_group import ClassWithInitArgs

NAMESPACE = "caldera"
"""Where Ray keeps the actors' names, so that any driver of the cluster finds them."""

_groups: WeakValueDictionary[str, RayWorkerGroup] = WeakValueDictionary()
"""The groups of this process, by a key that goes with their futures."""


class RayClassWithInitArgs(ClassWithInitArgs):
    """How to build a worker in an actor; the class may be wrapped in `ray.remote`."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        metadata = getattr(cls, "__ray_metadata__", None)
        super().__init__(
            metadata.modified_class.__ray_actor_class__ if metadata else cls, *args, **kwargs
        )
        self.options: dict[str, Any] = {}

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Options of the actors, such as {"runtime_env": ...}."""
        self.options.update(options)

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Custom resources that each actor takes, besides its share of the pool's."""
        self.options["resources"] = self.options.get("resources", {}) | dict(additional_resource)


@dataclass(frozen=True, eq=False)
class RayPending(Pending):
    """A result that an actor owes; another actor can wait for it too."""

    group: GroupElsewhere
    rank: int
    method: str
    failure: Any
    """Reference to the failure, if there is one; it is small, and comes when the call has ended."""
    value: Any
    """Reference to the value."""

    def result(self) -> Any:
        return self.group._resolve([self])[0]


@dataclass(frozen=True)
class GroupElsewhere:
    """What other processes get of a group: they can wait for its results."""

    key: str
    name: str
    world_size: int

    def _resolve(self, pending: list[RayPending]) -> list[Any]:
        group = _groups.get(self.key)
        if group is not None:
            return group._resolve(pending)
        ray = ray_module()
        failures = [f for f in ray.get([result.failure for result in pending]) if f is not None]
        if failures:
            raise worker_error(self.name, self.world_size, failures, [])
        values: list[Any] = ray.get([result.value for result in pending])
        return values

    getter = _resolve  # futures wait with either


class RayWorkerGroup(FailingGroup):
    """Workers in the actors of a Ray cluster.

    `timeout_s` is how long a collective may take, and how long all ranks of a call may be silent
    before the group is given up. `device_name` decides how the ranks talk: "cuda" by NCCL, "cpu" by
    gloo; by default the pool decides. A detached group outlives its driver: `from_detached` finds
    it again by its `worker_names`. Relative paths of the workers start from `folder`, by default
    this process's.
    """

    passes_futures = True
    grace_s = 1.0

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_wait_register_center_timeout: float = 300,
        device_name: str | None = None,
        *,
        timeout_s: float = 600.0,
        folder: str | None = None,
        name: str = "",
    ) -> None:
        if ray_cls_with_init is None:
            raise ConfigError("ray_cls_with_init: a group must know the class of its workers")
        found = len(worker_handles or worker_names or ())
        ranks = resource_pool.world_size if resource_pool else found
        super().__init__(ray_cls_with_init.cls, ranks, name)
        send_batches_as_arrays()
        self.timeout_s = timeout_s
        self.start_timeout_s = max(timeout_s, ray_wait_register_center_timeout)
        self.name_prefix = name_prefix or f"{secrets.token_hex(3)}_"
        self.worker_names = list(worker_names or ())
        self.workers: list[Any] = list(worker_handles or ())
        self._locations: dict[int, Location] = {}
        self._open: WeakSet[RayPending] = WeakSet()
        self._elsewhere = GroupElsewhere(secrets.token_hex(8), self.name, ranks)
        _groups[self._elsewhere.key] = self
        if resource_pool is None:
            self._attach()
            return
        if detached and not resource_pool.detached:
            raise ConfigError("detached=True: the group's pool must be detached as well")
        device = device_name or ("cuda" if resource_pool.use_gpu else "cpu")
        options = resource_pool.worker_share | getattr(ray_cls_with_init, "options", {})
        options |= {"lifetime": "detached"} if detached else {}
        strategy = STRICT_PACK if bin_pack else "PACK"
        bundles = resource_pool.bundles(strategy, ray_wait_register_center_timeout)
        self._create_actors(bundles, options)
        self._start(bundles, ray_cls_with_init, device, folder or os.getcwd())

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        **options: Any,
    ) -> RayWorkerGroup:
        """The group of actors that are there already, by their names or handles, in rank order."""
        return cls(
            None,
            ray_cls_with_init,
            name_prefix=name_prefix,
            worker_names=worker_names,
            worker_handles=worker_handles,
            **options,
        )

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make the group of each of these roles an attribute of this one."""
        for role, group in self.spawn(prefix_set).items():
            setattr(self, role, group)

    def is_alive(self, rank: int) -> bool:
        return self._ended is None and _find_actor(self.worker_names[rank]) is not None

    def shutdown(self) -> None:
        """End the actors, also detached ones; the pool keeps what it holds."""
        if self._ended is None:
            self._end("has been shut down")

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupElsewhere, (self._elsewhere.key, self.name, self.world_size)

    # ---- start

    def _create_actors(self, bundles: Sequence[Bundle], options: Mapping[str, Any]) -> None:
        strategies = ray_module("ray.util.scheduling_strategies")
        actor_class = ray_module().remote(RankActor)
        log_level = logging.getLogger().getEffectiveLevel()
        for rank, (bundle, place) in enumerate(zip(bundles, places_on_nodes(bundles), strict=True)):
            # Such as 4f2a1c_CriticWorker_1:0 for the first rank on the second node.
            name = f"{self.name_prefix}{self.worker_class.__name__}_{place.node}:{place.number}"
            strategy = strategies.PlacementGroupSchedulingStrategy(
                bundle.placement_group, bundle.index
            )
            actor = actor_class.options(
                name=name, namespace=NAMESPACE, scheduling_strategy=strategy, **options
            )
            self.worker_names.append(name)
            self.workers.append(actor.remote(self.name, rank, log_level))

    def _attach(self) -> None:
        for name in [] if self.workers else self.worker_names:
            actor = _find_actor(name)
            if actor is None:
                raise WorkerError(f"worker group {self.name}: the cluster has no actor {name!r}")
            self.workers.append(actor)
        if not self.workers:
            raise ConfigError("a group without a pool needs worker_names or worker_handles")
        self._locate()

    def _locate(self) -> None:
        asked = [self._ask(rank, "locate", START) for rank in range(self.world_size)]
        self._locations = dict(enumerate(self._await(asked, self.start_timeout_s)))

    def _start(
        self, bundles: Sequence[Bundle], recipe: ClassWithInitArgs, device: str, folder: str
    ) -> None:
        """Have the ranks meet, then build their workers."""
        self._locate()
        limit = self.start_timeout_s
        self.master_address = bundles[0].address
        opened = self._ask(0, "open_store", START, self.master_address, self.world_size, limit)
        self.master_port = str(self._await([opened], limit)[0])
        to_build = ray_module().put(recipe)
        started = []
        for rank, place in enumerate(places_on_nodes(bundles)):
            settings = RankSettings(
                world_size=self.world_size,
                environment=self._environment(rank, place),
                device=device,
                timeout_s=self.timeout_s,
                start_timeout_s=limit,
                seed=torch.initial_seed(),
                folder=folder,
            )
            started.append(self._ask(rank, "start", START, settings, to_build))
        self._await(started, limit)

    def _environment(self, rank: int, place: Place) -> dict[str, str]:
        return {
            "WORLD_SIZE": str(self.world_size),
            "RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(place.ranks_on_node),
            "LOCAL_RANK": str(place.number),
            "RAY_LOCAL_WORLD_SIZE": str(place.ranks_on_node),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": self.master_port,
            "WG_PREFIX": self.name_prefix,
            "WG_BACKEND": "ray",
        }

    # ---- calls

    def _submit(
        self, rank: int, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> RayPending:
        self._check_usable()
        return self._ask(
            rank, "call", method_name, method_name, tuple(kwargs), *args, *kwargs.values()
        )

    def _submit_all(self, method_name: str, shares: Sequence[Arguments]) -> list[RayPending]:
        """Each distinct value is written to the object store once, before any rank is called."""
        self._check_usable()
        ray, refs = ray_module(), dict[int, Any]()

        def sent(value: Any) -> Any:
            if value is None or isinstance(value, bool | int | float | str | ray.ObjectRef):
                return value
            if id(value) not in refs:
                refs[id(value)] = ray.put(value)
            return refs[id(value)]

        dispatched = [
            (tuple(map(sent, args)), {name: sent(value) for name, value in kwargs.items()})
            for args, kwargs in shares
        ]
        return [self._submit(rank, method_name, *own) for rank, own in enumerate(dispatched)]

    def _ask(self, rank: int, actor_method: str, method: str, *args: Any) -> RayPending:
        call = getattr(self.workers[rank], actor_method).options(num_returns=2)
        pending = RayPending(self._elsewhere, rank, method, *call.remote(*args))
        self._open.add(pending)
        return pending

    def _resolve(self, pending: list[RayPending]) -> list[Any]:
        return self._await(pending, self.timeout_s)

    def _await(self, pending: Sequence[RayPending], timeout_s: float) -> list[Any]:
        """The values of these results. The end of any call is noted, so that no failure waits."""
        self._wait_for(pending, timeout_s)
        ray, failures = ray_module(), dict[int, RankFailure]()
        values = list(dict.fromkeys(result.value for result in pending))
        ray.wait(values, num_returns=len(values), timeout=timeout_s)  # all come at the same time
        fetched = [self._fetched(result, result.value, failures) for result in pending]
        if failures:
            self._fail(failures, timeout_s)
        return fetched

    def _is_done(self, result: RayPending) -> bool:
        return result not in self._open

    def _take_answers(self, timeout_s: float, failures: dict[int, RankFailure]) -> bool:
        calls = {a.failure: a for a in self._open if a.rank not in failures}
        if not calls:
            return False
        ready, _ = ray_module().wait([*calls], num_returns=1, timeout=timeout_s)
        for ref in ready:
            self._open.discard(calls[ref])
            failure = self._fetched(calls[ref], ref, failures)
            if failure is not None:  # the clocks of nodes differ: what counts is when it is heard
                failures[failure.rank] = replace(failure, at=time.monotonic())
        return bool(ready)

    def _fetched(self, result: RayPending, ref: Any, failures: dict[int, RankFailure]) -> Any:
        """The value of the reference; an actor that is gone is noted, and None returned."""
        try:
            return ray_module().get(ref)
        except ray_module("ray.exceptions").RayError as error:
            gone = RankFailure(result.rank, result.method, reason_of(error))
            failures.setdefault(result.rank, gone)
            return None

    # ---- failures

    def _collect(
        self, failures: Mapping[int, RankFailure], silent_s: float
    ) -> tuple[list[RankFailure], list[WaitingRank]]:
        methods = {a.rank: a.method for a in self._open if a.rank not in failures}
        return tell(failures, methods, self._locations, silent_s)

    def _end(self, how: str) -> None:
        self._ended = how
        for actor in self.workers:
            ray_module().kill(actor)
        self._open.clear()


def _find_actor(name: str) -> Any:
    """The actor of that name, or None if there is none that lives."""
    try:
        return ray_module().get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
