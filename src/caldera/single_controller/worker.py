"""Worker: what holds a model on one rank."""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from caldera.errors import ProtocolError
from caldera.single_controller.decorator import Dispatch, Execute, register


class Worker:
    """Base of the roles.

    In a process of its own a worker reads its place from the environment: RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. In the controller's process the group
    tells it, by `place`, before anything else is called.
    """

    fused_worker_dict: Mapping[str, Worker] = {}
    """All workers of this rank by role, where several share one process."""

    _placed: tuple[int, int] | None = None
    _parts: Mapping[str, tuple[int, bool]] = {}

    def place(self, rank: int, world_size: int) -> None:
        self._placed = rank, world_size

    def close(self) -> None:
        """Let go of what outlives the process; called when the worker is shut down."""

    @property
    def rank(self) -> int:
        return self._placed[0] if self._placed else int(os.environ.get("RANK", "0"))

    @property
    def world_size(self) -> int:
        return self._placed[1] if self._placed else int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def local_rank(self) -> int:
        """Its number among the ranks of its machine."""
        return self._placed[0] if self._placed else int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def local_world_size(self) -> int:
        """How many ranks its machine has."""
        return self._placed[1] if self._placed else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def get_master_addr_port(self) -> tuple[str, str]:
        """Where the ranks of the group meet."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "0")

    def get_cuda_visible_devices(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    def print_rank0(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """`print`, on rank 0 alone."""
        if self.rank == 0:
            sys.stdout.write(sep.join(map(str, values)) + end)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(
        self, func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """`func(worker, ...)` on every rank, with the rank's rows."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`func(...)` on rank 0."""
        return func(*args, **kwargs)

    def _register_dispatch_collect_info(
        self, mesh_name: str, dp_rank: int, is_collect: bool
    ) -> None:
        """Say which part of a batch this rank takes on a mesh, and if its result is collected."""
        if mesh_name in self._parts:
            raise ProtocolError(f"mesh {mesh_name!r} is registered already")
        self._parts = {**self._parts, mesh_name: (dp_rank, is_collect)}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        return self._part(mesh_name)[0]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        return self._part(mesh_name)[1]

    def _part(self, mesh_name: str) -> tuple[int, bool]:
        if mesh_name not in self._parts:
            known = ", ".join(self._parts) or "none"
            raise ProtocolError(
                f"{type(self).__name__} has not registered a mesh {mesh_name!r} (known: {known})"
            )
        return self._parts[mesh_name]

    def get_fused_worker_by_name(self, worker_name: str) -> Worker | None:
        """The worker of another role in this process, if there is one."""
        return self.fused_worker_dict.get(worker_name)


def call_method(
    worker: Worker, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """A method's result; that of an async method too, which runs in this process's own loop."""
    outcome = getattr(worker, method_name)(*args, **kwargs)
    return _runner().run(outcome) if inspect.iscoroutine(outcome) else outcome


@functools.cache
def _runner() -> asyncio.Runner:
    """One loop for all calls, since what an async method opens may belong to its loop."""
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner
