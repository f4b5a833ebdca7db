"""ProcessWorkerGroup: one process a rank on this machine, with torch.distributed between them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from caldera.errors import ConfigError, UnsupportedError
from caldera.single_controller.decorator import Arguments
from caldera.single_controller.failure import (
    FailingGroup,
    OwedResult,
    RankFailure,
    WaitingRank,
    exit_failure,
    request_stack,
)
from caldera.single_controller.process_main import (
    START,
    STOP,
    RankSettings,
    loopback_store,
    run_rank,
)
from caldera.single_controller.resource_pool import ResourcePool
from caldera.single_controller.transport import (
    dumps,
    keep_handovers_quiet,
    loads,
    start_without_main,
)
from caldera.single_controller.worker import Worker
from caldera.single_controller.worker_group import ClassWithInitArgs
from caldera.storage.locks import own_folder

PRELOADED = ["torch", "transformers", "caldera.workers"]
"""The imports of the server of processes, so that no process has to."""
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
LOST_ANSWER_S = 0.5
"""How long a rank whose result cannot be read is waited for, in case it has died."""
DEATH_S = 10.0
"""How long the fork server of a busy machine may take to report how a rank has ended."""


@dataclass(eq=False)
class _Rank:
    """The controller's side of a process."""

    number: int
    process: ForkServerProcess
    connection: Connection
    log: str
    stack_file: Path
    outstanding: deque[OwedResult] = field(default_factory=deque)
    """Results that are owed; they come in this order."""

    @property
    def method(self) -> str:
        """What it is doing, if anything."""
        return self.outstanding[0].method if self.outstanding else ""


class ProcessWorkerGroup(FailingGroup):
    """Workers in subprocesses on this machine.

    `timeout_s` is how long a collective may take, and how long all ranks of a call may be silent
    before the group is given up. What a rank writes goes to `{log_dir}/{name}_rank{rank}.log`;
    without `log_dir` to a new folder, which a group that ends well removes.
    """

    def __init__(
        self,
        resource_pool: ResourcePool,
        make_worker: Callable[[], Worker],
        name: str = "",
        *,
        device: str = "cpu",
        timeout_s: float = 600.0,
        log_dir: str | Path | None = None,
    ) -> None:
        if not isinstance(make_worker, ClassWithInitArgs):
            raise ConfigError(
                "workers in other processes are built by a ClassWithInitArgs, got "
                f"{type(make_worker).__name__}"
            )
        if len(resource_pool.store) != 1:
            raise UnsupportedError(
                f"a local group on {len(resource_pool.store)} nodes {resource_pool.store}: "
                "it takes one (trainer.nnodes); more need Ray"
            )
        keep_handovers_quiet()
        visible = _visible_devices(resource_pool, device)
        recipe = dumps(make_worker)
        super().__init__(make_worker.cls, resource_pool.world_size, name)
        self.timeout_s = timeout_s
        # A group that is killed cannot remove its folders: the next one does.
        temporary = Path(tempfile.gettempdir())
        self._stacks = own_folder("caldera-stacks", temporary)
        self._folders = [self._stacks]  # to be removed in the end
        if log_dir is None:
            log_dir = own_folder("caldera-logs", temporary)
            self._folders.append(log_dir)
        self.log_dir = Path(log_dir)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._store = loopback_store()
        self.master_address, self.master_port = "127.0.0.1", str(self._store.port)
        self._ranks: list[_Rank] = []
        Finalize(self, _end_processes, (self._ranks, self._folders), exitpriority=10)
        for settings in self._settings(device, visible):
            self._ranks.append(_launch(settings, self.name))
        started = [self._send(rank, START, recipe) for rank in self._ranks]
        self._wait_for(started, max(timeout_s, START_TIMEOUT_S))

    @property
    def worker_names(self) -> list[str]:
        return [f"{self.name}_rank{rank}" for rank in range(self.world_size)]

    def is_alive(self, rank: int) -> bool:
        return self._ended is None and self._ranks[rank].process.is_alive()

    def shutdown(self) -> None:
        if self._ended is not None:
            return
        self._ended = "has been shut down"
        if not any(rank.outstanding for rank in self._ranks):
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for rank in self._ranks:
                with suppress(OSError):
                    rank.connection.send_bytes(STOP)
            for rank in self._ranks:
                rank.process.join(max(0.0, deadline - time.monotonic()))
        _end_processes(self._ranks, self._folders)

    # ---- start

    def _settings(self, device: str, visible: list[dict[str, str]]) -> list[RankSettings]:
        asked = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(asked) if asked.isdigit() else max(1, _cores() // self.world_size)
        environments = _environments(self.name, self.master_port, threads, visible)
        return [
            RankSettings(
                rank=rank,
                world_size=self.world_size,
                environment=environment,
                log=str(self.log_dir / f"{name}.log"),
                stack_file=str(self._stacks / name),
                threads=threads,
                device=device,
                store_port=self._store.port,
                timeout_s=self.timeout_s,
                start_timeout_s=max(self.timeout_s, START_TIMEOUT_S),
                seed=torch.initial_seed(),
                controller_pid=os.getpid(),
                log_level=logging.getLogger().getEffectiveLevel(),
            )
            for rank, (environment, name) in enumerate(
                zip(environments, self.worker_names, strict=True)
            )
        ]

    # ---- calls

    def _submit(
        self, rank: int, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> OwedResult:
        self._check_usable()
        return self._send(self._ranks[rank], method_name, dumps((tuple(args), dict(kwargs))))

    def _submit_all(self, method_name: str, shares: Sequence[Arguments]) -> list[OwedResult]:
        self._check_usable()
        # All or none: what cannot be sent must not leave some ranks waiting for the others.
        payloads = [dumps(share) for share in shares]
        return [
            self._send(rank, method_name, payload)
            for rank, payload in zip(self._ranks, payloads, strict=True)
        ]

    def _send(self, rank: _Rank, method: str, payload: bytes) -> OwedResult:
        pending = OwedResult(self, method)
        try:
            rank.connection.send_bytes(pickle.dumps((method, payload)))
        except OSError:  # it is gone
            self._fail({rank.number: self._death_of(rank)})
        rank.outstanding.append(pending)
        return pending

    def _resolve(self, pending: list[OwedResult]) -> list[Any]:
        self._wait_for(pending, self.timeout_s)
        return [result.value for result in pending]

    def _take_answers(self, timeout_s: float, failures: dict[int, RankFailure]) -> bool:
        ranks = [rank for rank in self._ranks if rank.number not in failures]
        events = {
            event: rank for rank in ranks for event in (rank.connection, rank.process.sentinel)
        }
        ready = wait(list(events), timeout_s)
        for rank in dict.fromkeys(events[event] for event in ready):  # type: ignore[index]
            failure = self._take_answers_of(rank)
            if failure is not None:
                failures[rank.number] = failure
        return bool(ready)

    def _take_answers_of(self, rank: _Rank) -> RankFailure | None:
        while rank.connection.poll():
            try:
                message = rank.connection.recv_bytes()
            except (EOFError, OSError):
                return self._death_of(rank)
            loaded = self._loaded(rank, message)
            if isinstance(loaded, RankFailure):
                return loaded
            is_value, value = loaded
            if not is_value:
                assert isinstance(value, RankFailure)
                return value
            result = rank.outstanding.popleft()
            result.value, result.is_done = value, True
        return None if rank.process.is_alive() else self._death_of(rank)

    def _loaded(self, rank: _Rank, message: bytes) -> tuple[bool, Any] | RankFailure:
        try:
            is_value, value = loads(message)
        except BaseException as error:
            if isinstance(error, EOFError | OSError | RuntimeError):
                rank.process.join(LOST_ANSWER_S)
                if not rank.process.is_alive():  # it died, and the tensors of its result with it
                    return self._death_of(rank)
            # One result more than was asked for could not be told from the next.
            self._ended = "was ended, since an answer could not be read"
            _end_processes(self._ranks, self._folders)
            raise
        return is_value, value

    # ---- failures

    def _death_of(self, rank: _Rank) -> RankFailure:
        rank.process.join(DEATH_S)
        return exit_failure(rank.number, rank.method, rank.process.exitcode, rank.log)

    def _collect(
        self, failures: Mapping[int, RankFailure], silent_s: float
    ) -> tuple[list[RankFailure], list[WaitingRank]]:
        waiting = [
            WaitingRank(
                rank.number,
                rank.method,
                request_stack(rank.process.pid or 0, rank.stack_file),
                rank.log,
            )
            for rank in self._ranks
            if rank.outstanding and rank.number not in failures
        ]
        return list(failures.values()), waiting

    def _end(self, how: str) -> None:
        self._ended = how
        _end_processes(self._ranks, [self._stacks])
        self._folders.clear()  # the error names the logs


def _launch(settings: RankSettings, group: str) -> _Rank:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    _start_fork_server()
    Path(settings.stack_file).touch()
    own, theirs = context.Pipe()
    process = context.Process(
        target=run_rank, args=(settings, theirs), name=f"{group}_rank{settings.rank}"
    )
    start_without_main(process)
    theirs.close()
    return _Rank(settings.rank, process, own, settings.log, Path(settings.stack_file))


def _start_fork_server() -> None:
    """Start it deaf to Ctrl-C, of which it would tell with a traceback while it imports. Ranks hear
    again once they are out of reach of the terminal."""
    resource_tracker.ensure_running()  # which would have the signal heard again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_processes(ranks: list[_Rank], folders: list[Path]) -> None:
    """End the processes, and whatever they started, at once; remove the folders."""
    for rank in ranks:
        assert rank.process.pid, "a rank is kept once its process has started"
        with suppress(OSError):  # it is gone, or was ended before it led a group of its own
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.kill()
    for rank in ranks:
        rank.process.join(STOP_TIMEOUT_S)
        rank.connection.close()
    ranks.clear()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _environments(
    prefix: str, port: str, threads: int, visible: list[dict[str, str]]
) -> list[dict[str, str]]:
    """The environment of each rank: this process's, and its place."""
    world_size = str(len(visible))
    shared = dict(os.environ) | {
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "RAY_LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": str(threads),
        "WG_PREFIX": prefix,
        "WG_BACKEND": "local",
    }
    if sys.platform == "linux":
        shared.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it asks for this machine's name
    return [
        shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | devices
        for rank, devices in enumerate(visible)
    ]


def _visible_devices(pool: ResourcePool, device: str) -> list[dict[str, str]]:
    """For each rank, the variable by which it sees its own GPU alone."""
    if not device.startswith("cuda"):
        return [{} for _ in pool.slots]
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    known = [str(i) for i in range(torch.cuda.device_count())]
    names = known if listed is None else [name for name in listed.split(",") if name]
    wanted = max(device_number for _, device_number in pool.slots) + 1
    if wanted > len(names):
        raise ConfigError(
            f"the pool wants {wanted} GPUs, there are {len(names)} (trainer.n_gpus_per_node)"
        )
    return [{"CUDA_VISIBLE_DEVICES": names[number]} for _, number in pool.slots]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
