"""WorkerGroup: many workers behind one object whose methods look like a single worker's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from caldera.errors import UnsupportedError
from caldera.single_controller.decorator import (
    Execute,
    Registration,
    collect,
    dispatch,
    registration_of,
)
from caldera.single_controller.resource_pool import ResourcePool
from caldera.single_controller.worker import Worker


class LocalWorkerGroup:
    """Workers in this process, so that `breakpoint()` works anywhere below.

    Every `@register`ed method of the worker class is a method of the group: it deals the arguments
    to the ranks, runs them, and joins the answers.
    """

    def __init__(self, resource_pool: ResourcePool, make_worker: Callable[[], Worker]) -> None:
        if resource_pool.world_size != 1:
            raise UnsupportedError(
                f"a local group of {resource_pool.world_size} processes: this release takes 1"
            )
        self.world_size = resource_pool.world_size
        self.workers = [make_worker() for _ in range(self.world_size)]
        for rank, worker in enumerate(self.workers):
            worker.place(rank, self.world_size)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "workers":  # of a group that is being copied or unpickled
            raise AttributeError(name)
        worker_class = type(self.workers[0])
        found = registration_of(getattr(worker_class, name, None))
        if found is None:
            raise AttributeError(f"{worker_class.__name__} registers no method {name!r}")
        return partial(self._call, name, found)

    def _call(self, name: str, registered: Registration, *args: Any, **kwargs: Any) -> Any:
        shares = dispatch(registered.dispatch_mode, self.world_size, args, kwargs)
        if registered.execute_mode is Execute.RANK_ZERO:
            shares = shares[:1]
        outputs = [
            getattr(worker, name)(*own_args, **own_kwargs)
            for worker, (own_args, own_kwargs) in zip(self.workers, shares, strict=False)
        ]
        return collect(registered.dispatch_mode, outputs)
