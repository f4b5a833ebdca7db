"""Groups on this machine: in this process, or in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caldera.errors import UnsupportedError
from caldera.single_controller.processes import ProcessWorkerGroup
from caldera.single_controller.resource_pool import ResourcePool
from caldera.single_controller.worker import Worker, call_method
from caldera.single_controller.worker_group import Pending, WorkerGroup


@dataclass(frozen=True)
class Finished(Pending):
    """An answer that was computed when it was asked for."""

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
        return [answer.value for answer in pending]

    def shutdown(self) -> None:
        """Let go of the worker."""
        for worker in self.workers:
            worker.close()
        self.workers.clear()


def LocalWorkerGroup(
    resource_pool: ResourcePool,
    make_worker: Callable[[], Worker],
    name: str = "",
    *,
    device: str = "cpu",
    timeout_s: float = 600.0,
    log_dir: str | Path | None = None,
) -> WorkerGroup:
    """A group on this machine: in this process if the pool has one rank, else one process a rank.

    Several processes need a `ClassWithInitArgs`, and the rest of the arguments are theirs: see
    `ProcessWorkerGroup`.
    """
    if resource_pool.world_size == 1:
        return InProcessWorkerGroup(resource_pool, make_worker, name)
    return ProcessWorkerGroup(
        resource_pool, make_worker, name, device=device, timeout_s=timeout_s, log_dir=log_dir
    )
