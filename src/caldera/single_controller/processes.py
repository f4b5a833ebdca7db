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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from caldera.errors import ConfigError, UnsupportedError, WorkerError
from caldera.single_controller.decorator import Arguments
from caldera.single_controller.failure import (
    RankFailure,
    WaitingRank,
    exit_failure,
    patience,
    request_stack,
    silence_failure,
    worker_error,
)
from caldera.single_controller.process_main import START, STOP, RankSettings, run_rank
from caldera.single_controller.resource_pool import ResourcePool
from caldera.single_controller.transport import dumps, keep_handovers_quiet, loads
from caldera.single_controller.worker import Worker
from caldera.single_controller.worker_group import ClassWithInitArgs, Pending, WorkerGroup

PRELOADED = ["torch", "transformers", "caldera.workers"]
"""What the server of processes imports once, so that no process has to."""
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
GRACE_S = 0.5
"""How long to look for other failures once there is one, so that the first can be told."""
LONG_GRACE_S = 5.0
"""The same when all failures look like the consequence of another."""
DEATH_S = 10.0
"""How long the fork server of a busy machine may take to tell how a rank has ended."""


@dataclass(eq=False)
class ProcessPending(Pending):
    """An answer that a rank owes."""

    group: ProcessWorkerGroup
    method: str
    is_done: bool = False
    value: Any = None

    def result(self) -> Any:
        return self.group._resolve([self])[0]


@dataclass(eq=False)
class _Rank:
    """The controller's side of a process."""

    number: int
    process: ForkServerProcess
    connection: Connection
    log: str
    stack_file: Path
    outstanding: deque[ProcessPending] = field(default_factory=deque)
    """Answers that are owed; they come in this order."""

    @property
    def method(self) -> str:
        """What it is doing, if anything."""
        return self.outstanding[0].method if self.outstanding else ""


class ProcessWorkerGroup(WorkerGroup):
    """Workers in processes of their own on this machine.

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
        self._ended: str | None = None
        self._stacks = Path(tempfile.mkdtemp(prefix="caldera-stacks-"))
        self._folders = [self._stacks]  # to be removed in the end
        if log_dir is None:
            log_dir = tempfile.mkdtemp(prefix="caldera-logs-")
            self._folders.append(Path(log_dir))
        self.log_dir = Path(log_dir)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        # Held here: the system chooses the port, and no other process can take it before the ranks.
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self.master_address, self.master_port = "127.0.0.1", str(self._store.port)
        self._ranks: list[_Rank] = []
        Finalize(self, _end, (self._ranks, self._folders), exitpriority=10)
        for settings in self._settings(device, visible):
            self._ranks.append(_launch(settings, self.name))
        started = [self._send(rank, START, recipe) for rank in self._ranks]
        self._await(started, max(timeout_s, START_TIMEOUT_S))

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
        _end(self._ranks, self._folders)

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
    ) -> ProcessPending:
        self._check_usable()
        return self._send(self._ranks[rank], method_name, dumps((tuple(args), dict(kwargs))))

    def _submit_all(self, method_name: str, shares: Sequence[Arguments]) -> list[ProcessPending]:
        self._check_usable()
        # All or none: what cannot be sent must not leave some ranks waiting for the others.
        payloads = [dumps(share) for share in shares]
        return [
            self._send(rank, method_name, payload)
            for rank, payload in zip(self._ranks, payloads, strict=True)
        ]

    def _send(self, rank: _Rank, method: str, payload: bytes) -> ProcessPending:
        pending = ProcessPending(self, method)
        try:
            rank.connection.send_bytes(pickle.dumps((method, payload)))
        except OSError:  # it is gone
            self._fail({rank.number: self._death_of(rank)})
        rank.outstanding.append(pending)
        return pending

    def _resolve(self, pending: list[ProcessPending]) -> list[Any]:
        self._await(pending, self.timeout_s)
        return [answer.value for answer in pending]

    def _await(self, pending: Collection[ProcessPending], timeout_s: float) -> None:
        """Take answers until these have come."""
        while not all(answer.is_done for answer in pending):
            self._check_usable()
            failures: dict[int, RankFailure] = {}
            limit = patience(timeout_s, any(answer.is_done for answer in pending))
            if not self._take_answers(limit, failures):
                self._fail({}, limit)
            if failures:
                self._fail(failures)

    def _take_answers(self, timeout_s: float, failures: dict[int, RankFailure]) -> bool:
        """Wait for any rank, and note answers and failures; whether there was anything."""
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
            answer = rank.outstanding.popleft()
            answer.value, answer.is_done = value, True
        return None if rank.process.is_alive() else self._death_of(rank)

    def _loaded(self, rank: _Rank, message: bytes) -> tuple[bool, Any] | RankFailure:
        try:
            is_value, value = loads(message)
        except BaseException as error:
            if isinstance(error, EOFError | OSError | RuntimeError):
                rank.process.join(GRACE_S)
                if not rank.process.is_alive():  # it died, and the tensors of its answer with it
                    return self._death_of(rank)
            # One answer more than was asked for could not be told from the next.
            self._ended = "was ended, since an answer could not be read"
            _end(self._ranks, self._folders)
            raise
        return is_value, value

    # ---- failures

    def _check_usable(self) -> None:
        if self._ended is not None:
            raise WorkerError(f"worker group {self.name} {self._ended}")

    def _death_of(self, rank: _Rank) -> RankFailure:
        rank.process.join(DEATH_S)
        return exit_failure(rank.number, rank.method, rank.process.exitcode, rank.log)

    def _fail(self, failures: dict[int, RankFailure], silent_s: float = 0.0) -> NoReturn:
        """End the group and raise what happened; no failure means silence."""
        if failures:
            self._look_for_more(failures)
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
        found = list(failures.values()) or [silence_failure(waiting, silent_s)]
        error = worker_error(self.name, self.world_size, found, waiting)
        self._ended = "was ended after a failure"
        _end(self._ranks, [self._stacks])
        self._folders.clear()  # the logs are told of
        raise error

    def _look_for_more(self, failures: dict[int, RankFailure]) -> None:
        start = time.monotonic()
        while len(failures) < self.world_size:
            is_cause_known = not all(failure.in_collective for failure in failures.values())
            rest = start + (GRACE_S if is_cause_known else LONG_GRACE_S) - time.monotonic()
            if rest <= 0:
                return
            self._take_answers(rest, failures)


def _launch(settings: RankSettings, group: str) -> _Rank:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    _start_fork_server()
    Path(settings.stack_file).touch()
    own, theirs = context.Pipe()
    process = context.Process(
        target=run_rank, args=(settings, theirs), name=f"{group}_rank{settings.rank}"
    )
    process.start()
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


def _end(ranks: list[_Rank], folders: list[Path]) -> None:
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
