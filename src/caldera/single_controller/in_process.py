"""Groups on this machine, and several roles in the same processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caldera.errors import ConfigError, UnsupportedError
from caldera.single_controller.decorator import ATTRIBUTE, registration_of
from caldera.single_controller.dispatching import Pending
from caldera.single_controller.processes import ProcessWorkerGroup
from caldera.single_controller.resource_pool import ResourcePool
from caldera.single_controller.worker import Worker, call_method
from caldera.single_controller.worker_group import ClassWithInitArgs, WorkerGroup


class WorkerDict(Worker):
    """A worker of each role, built in order; a role's method `m` is called `{role}_m`."""

    role_classes: Mapping[str, type[Worker]] = {}

    def __init__(self, recipes: Mapping[str, Callable[[], Worker]]) -> None:
        super().__init__()
        self.worker_dict = {role: build() for role, build in recipes.items()}
        self.fused_worker_dict = self.worker_dict
        for worker in self.worker_dict.values():
            worker.fused_worker_dict = self.worker_dict

    def place(self, rank: int, world_size: int) -> None:
        super().place(rank, world_size)
        for worker in self.worker_dict.values():
            worker.place(rank, world_size)

    def close(self) -> None:
        for worker in self.worker_dict.values():
            worker.close()


class ColocatedClass(ClassWithInitArgs):
    """How to build a WorkerDict. Its class is made anew wherever it is unpickled."""

    def __init__(self, recipes: Mapping[str, ClassWithInitArgs]) -> None:
        classes = {role: recipe.cls for role, recipe in recipes.items()}
        super().__init__(worker_dict_class(classes), recipes)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ClassWithInitArgs:
    """One worker that holds all roles; `group.spawn(roles)` gives a group for each of them."""
    return ColocatedClass(dict(class_dict))


create_colocated_worker_cls_fused = create_colocated_worker_cls
"""verl's newer name: here, too, the roles know each other by `fused_worker_dict`."""


def worker_dict_class(role_classes: Mapping[str, type[Worker]]) -> type[WorkerDict]:
    """A WorkerDict with the registered methods of all roles, as `{role}_{method}`."""
    if not role_classes:
        raise ConfigError("a worker of several roles needs at least one role")
    members: dict[str, Any] = {"role_classes": dict(role_classes), "__module__": __name__}
    for role, role_class in role_classes.items():
        for name in dir(role_class):
            method = getattr(role_class, name, None)
            if registration_of(method) is not None:
                members[f"{role}_{name}"] = _of_role(role, name, method)
    return type("WorkerDict", (WorkerDict,), members)


def _of_role(role: str, name: str, method: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: WorkerDict, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker_dict[role], name)(*args, **kwargs)

    setattr(call, ATTRIBUTE, getattr(method, ATTRIBUTE))
    return call


@dataclass(frozen=True)
class Finished(Pending):
    """A result that was computed when it was asked for."""

    value: Any

    def result(self) -> Any:
        return self.value


class InProcessWorkerGroup(WorkerGroup):
    """One worker in this process, so that `breakpoint()` works anywhere below."""

    crosses_processes = False

    def __init__(
        self, resource_pool: ResourcePool, make_worker: Callable[[], Worker], name: str = ""
    ) -> None:
        if resource_pool.world_size != 1:
            raise UnsupportedError(
                f"a group of {resource_pool.world_size} workers in this process: it takes 1"
            )
        worker = make_worker()
        worker.place(0, 1)
        self.workers = [worker]
        super().__init__(type(worker), 1, name)

    def is_alive(self, rank: int) -> bool:
        return bool(self.workers)

    def _submit(
        self, rank: int, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Finished:
        return Finished(call_method(self.workers[rank], method_name, args, kwargs))

    def _resolve(self, pending: list[Finished]) -> list[Any]:
        return [result.value for result in pending]

    def shutdown(self) -> None:
        """Let go of the worker."""
        for worker in self.workers:
            worker.close()
        self.workers.clear()


def LocalWorkerGroup(
    resource_pool: ResourcePool, make_worker: Callable[[], Worker], name: str = "", **options: Any
) -> WorkerGroup:
    """A group on this machine: in this process if the pool has one rank, else one process a rank.

    Several processes need a `ClassWithInitArgs`; the options are those of `ProcessWorkerGroup`.
    """
    if resource_pool.world_size == 1:
        return InProcessWorkerGroup(resource_pool, make_worker, name)
    return ProcessWorkerGroup(resource_pool, make_worker, name, **options)
