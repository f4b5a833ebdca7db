"""WorkerGroup: many workers behind one object whose methods look like a single worker's."""

from __future__ import annotations

import logging
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from caldera.errors import ProtocolError, RegistryError
from caldera.protocol import DataProto
from caldera.protocol.inputs import entries
from caldera.single_controller.decorator import (
    Arguments,
    Dispatch,
    DispatchMode,
    Execute,
    Registration,
    functions_of,
    materialize,
    registration_of,
)
from caldera.single_controller.dispatching import (
    PADDING_KEY,
    Balancing,
    SpreadRows,
    without_padding,
)
from caldera.single_controller.worker import Worker

logger = logging.getLogger(__name__)

W = TypeVar("W", bound=Worker)


class ClassWithInitArgs:
    """How to build a worker, wherever it will live: calling it builds one."""

    def __init__(self, cls: type[Worker], *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Worker:
        return self.cls(*self.args, **self.kwargs)


class WorkerGroup(ABC):
    """Every `@register`ed method of the worker class is a method of the group.

    It splits the arguments among the ranks, runs them, and joins the results. Subclasses say how a
    rank is reached, by `_submit` and `_resolve`.
    """

    crosses_processes: bool = True
    """Whether the workers live in other processes, so that batches are cut to what is needed."""
    passes_futures: bool = False
    """Whether a worker can wait for a DataProtoFuture itself."""
    balancing: Balancing | None = None
    """How rows are spread over the ranks; None: they must fill the ranks as they are."""

    def __init__(self, worker_class: type[Worker], world_size: int, name: str = "") -> None:
        self.worker_class = worker_class
        self._world_size = world_size
        self.name = name or worker_class.__name__
        self._mesh_info: dict[tuple[str, str], list[Any]] = {}
        self._methods = _registered_methods(worker_class, type(self))

    @property
    def world_size(self) -> int:
        return self._world_size

    @abstractmethod
    def _submit(
        self, rank: int, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Start a method on a rank and return what stands for its result."""

    @abstractmethod
    def _resolve(self, pending: list[Any]) -> list[Any]:
        """Wait for the results, in the order of the list."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers; the group cannot be called any more."""

    def is_alive(self, rank: int) -> bool:
        """Whether the rank can be called."""
        return True

    def getter(self, pending: list[Any]) -> list[Any]:
        """The function that a DataProtoFuture of this group waits with."""
        return self._resolve(pending)

    # ---- calls by the name of a registered method

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in ("_methods", "worker_class"):  # of a group that is being copied or unpickled
            raise AttributeError(name)
        if name not in self._methods:
            raise AttributeError(f"{self.worker_class.__name__} registers no method {name!r}")
        return partial(self._call, name, self._methods[name])

    def typed(self, worker_class: type[W]) -> W:
        """This group as editors and type checkers see it: with the methods of its workers.

        Calls with a batch have the types of the worker's method; those to all ranks, such as
        `save_checkpoint`, return a list of what it returns.
        """
        return cast(W, self)

    def _call(self, method_name: str, registered: Registration, *args: Any, **kwargs: Any) -> Any:
        if registered.materialize_futures and not self.passes_futures:
            args, kwargs = materialize(args, kwargs)
        spread = self._spread(registered, args)
        if registered.needs is not None and self.crosses_processes:
            args = tuple(_needed(value, registered.needs) for value in args)
            kwargs = {name: _needed(value, registered.needs) for name, value in kwargs.items()}
        if spread is not None:
            args = (spread.send(args[0]), *args[1:])
        dispatch_fn, collect_fn = functions_of(registered.dispatch_mode)
        dispatched, named = dispatch_fn(self, *args, **kwargs)
        named = dict(named)
        pad_size = named.pop(PADDING_KEY, 0)
        if registered.execute_mode is Execute.RANK_ZERO:
            # What is passed on as it is, is not scattered either.
            scatter = registered.dispatch_mode != Dispatch.ALL_TO_ALL
            own_args, own_kwargs = self._shares(dispatched, named, scatter)[0]
            pending = self._submit(0, method_name, own_args, own_kwargs)
            result = self._resolve([pending])[0] if registered.blocking else pending
        else:
            results = self._submit_all(method_name, self._shares(dispatched, named))
            result = collect_fn(self, self._resolve(results) if registered.blocking else results)
        return without_padding(result, pad_size) if spread is None else spread.restore(result)

    def _spread(self, registered: Registration, args: Sequence[Any]) -> SpreadRows | None:
        """Which rank gets which row of the first argument, if this call is to be balanced."""
        mode = registered.dispatch_mode
        cuts_rows = mode == Dispatch.DP_COMPUTE_PROTO or _mesh_of(mode) is not None
        if self.balancing is None or self.world_size == 1 or not (registered.balance and cuts_rows):
            return None
        if not args or not isinstance(args[0], DataProto):
            return None
        ranks = self._parts(registered)
        return self.balancing.spread(args[0], ranks, registered.in_mini_batches)

    def balance_metrics(self, batch: DataProto) -> dict[str, float]:
        """How unequal the work of the ranks is in an update; empty without balancing."""
        if self.balancing is None or self.world_size == 1:
            return {}
        updates = [noted for noted in self._methods.values() if noted.in_mini_batches]
        ranks = self._parts(updates[0]) if updates else self.world_size
        return self.balancing.metrics(batch, ranks)

    def _shares(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], scatter: bool = True
    ) -> list[Arguments]:
        """The arguments of each rank: its elements, if all are lists with one for each rank."""
        ranks = range(self.world_size)
        values = [*args, *kwargs.values()]
        if scatter and all(isinstance(v, list) and len(v) == self.world_size for v in values):
            return [
                (tuple(v[rank] for v in args), {name: v[rank] for name, v in kwargs.items()})
                for rank in ranks
            ]
        return [(tuple(args), dict(kwargs)) for _ in ranks]

    def _submit_all(self, method_name: str, shares: Sequence[Arguments]) -> list[Any]:
        """Start a method on the first ranks, with the arguments of each."""
        return [self._submit(rank, method_name, *own) for rank, own in enumerate(shares)]

    # ---- calls of any method

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Start a method on all ranks; returns what stands for the results.

        If all arguments are lists with one element for each rank, each gets its own; else every
        rank gets all of them.
        """
        return self._submit_all(method_name, self._shares(args, kwargs))

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The results of all ranks."""
        return self._resolve(self.execute_all_async(method_name, *args, **kwargs))

    execute_all = execute_all_async

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Start a method on rank 0, with the arguments as they are."""
        return self._submit(0, method_name, args, kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """The result of rank 0."""
        return self._resolve([self.execute_rank_zero_async(method_name, *args, **kwargs)])[0]

    execute_rank_zero = execute_rank_zero_async

    # ---- meshes

    def dispatch_info(self, mesh_name: str) -> list[int]:
        """Which part of a batch each rank takes on a mesh; the workers are asked once."""
        return self._asked("_query_dispatch_info", mesh_name)

    def collect_info(self, mesh_name: str) -> list[bool]:
        """Whether each rank's result is collected on a mesh; the workers are asked once."""
        return self._asked("_query_collect_info", mesh_name)

    def _parts(self, registered: Registration) -> int:
        """Into how many parts the rows of a batch are cut for a method."""
        mesh_name = _mesh_of(registered.dispatch_mode)
        return self.world_size if mesh_name is None else max(self.dispatch_info(mesh_name)) + 1

    def _asked(self, method_name: str, mesh_name: str) -> list[Any]:
        key = method_name, mesh_name
        if key not in self._mesh_info:
            shares = self._shares((mesh_name,), {}, scatter=False)
            self._mesh_info[key] = self._resolve(self._submit_all(method_name, shares))
        return self._mesh_info[key]

    # ---- several roles in the same processes

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """A group for each of these roles, in the processes of this one."""
        roles: Mapping[str, type[Worker]] = getattr(self.worker_class, "role_classes", {})
        wanted = list(prefix_set)
        for role in wanted:
            if role not in roles:
                raise ProtocolError(
                    f"spawn: {self.worker_class.__name__} has no role {role!r} "
                    f"(known: {', '.join(roles) or 'none'})"
                )
        return {role: RoleGroup(self, role, roles[role]) for role in wanted}

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Watch the workers in a thread: when one is gone, this process gets SIGABRT."""
        threading.Thread(target=self._watch, args=(every_n_seconds,), daemon=True).start()

    def _watch(self, every_n_seconds: float) -> None:
        while all(self.is_alive(rank) for rank in range(self.world_size)):
            threading.Event().wait(every_n_seconds)
        logger.critical("a worker of the group %s is gone", self.name)
        os.kill(os.getpid(), signal.SIGABRT)


class RoleGroup(WorkerGroup):
    """One role of a group whose processes hold several."""

    def __init__(self, whole: WorkerGroup, role: str, role_class: type[Worker]) -> None:
        super().__init__(role_class, whole.world_size, role)
        self.whole = whole
        self.crosses_processes = whole.crosses_processes
        self.passes_futures = whole.passes_futures

    def _submit(
        self, rank: int, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return self.whole._submit(rank, f"{self.name}_{method_name}", args, kwargs)

    def _submit_all(self, method_name: str, shares: Sequence[Arguments]) -> list[Any]:
        return self.whole._submit_all(f"{self.name}_{method_name}", shares)

    def _resolve(self, pending: list[Any]) -> list[Any]:
        return self.whole._resolve(pending)

    def is_alive(self, rank: int) -> bool:
        return self.whole.is_alive(rank)

    def shutdown(self) -> None:
        """End the processes, and with them every role in them."""
        self.whole.shutdown()


def _registered_methods(
    worker_class: type[Worker], group_class: type[WorkerGroup]
) -> dict[str, Registration]:
    found = {}
    for name in dir(worker_class):
        registered = registration_of(getattr(worker_class, name, None))
        if registered is None:
            continue
        if hasattr(group_class, name):
            raise RegistryError(
                f"{worker_class.__name__} registers a method {name!r}, which is one of the group's"
            )
        found[name] = registered
    return found


def _mesh_of(mode: DispatchMode) -> str | None:
    """The mesh by which a mode cuts rows, if it is one of that kind."""
    return None if isinstance(mode, Dispatch) else mode.get("mesh_name")


def _needed(value: Any, needs: Sequence[str]) -> Any:
    """A DataProto with only those of the needed tensors and columns that it has."""
    if not isinstance(value, DataProto):
        return value
    tensors = [key for key in needs if key in entries(value.batch)]
    return value.select(tensors, [key for key in needs if key in value.non_tensor_batch])
