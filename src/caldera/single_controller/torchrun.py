"""TorchrunWorkerGroup: the ranks are processes that torchrun has started.

Rank 0 runs the controller, and its own worker in a thread beside it; the others serve its calls, in
`serve`, until it shuts them down. Calls and results travel over gloo. When a rank fails, rank 0
raises what happened; with its end torchrun ends the others.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from caldera.single_controller.failure import (
    FailingGroup,
    OwedResult,
    RankFailure,
    WaitingRank,
    exception_failure,
)
from caldera.single_controller.process_main import join_ranks
from caldera.single_controller.worker import Worker, call_method
from caldera.single_controller.worker_group import ClassWithInitArgs

START, STOP = "__init__", "__stop__"
SETTINGS = "caldera/settings"
FOREVER = timedelta(days=365)
"""Ranks wait as long as rank 0 has nothing for them; its end ends the waiting."""
TELLING_S = 20.0
"""How long rank 0 lives after torchrun has told it to end, as it does when another rank has died:
until then it has told of that."""


def launched_ranks() -> int:
    """How many processes torchrun has started for this run; 1 where it was not used."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 1
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_nodes() -> tuple[int, int]:
    """Of a run of torchrun: the nodes, and the processes of each."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return launched_ranks() // local, local


def is_controller() -> bool:
    """Whether this process is the one that controls the run."""
    return launched_ranks() == 1 or os.environ["RANK"] == "0"


_Settings: TypeAlias = tuple[str, float]
"""What rank 0 tells the others before they meet: the device, and how long a collective may take."""


class TorchrunWorkerGroup(FailingGroup):
    """To be made on rank 0, once in a process."""

    def __init__(
        self,
        make_worker: ClassWithInitArgs,
        name: str = "",
        *,
        device: str = "cpu",
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(make_worker.cls, launched_ranks(), name)
        self.timeout_s = timeout_s
        signal.signal(signal.SIGTERM, _end_soon)
        self._control = _meet((device, timeout_s))
        self._outcomes: queue.SimpleQueue[tuple[int, bool, Any]] = queue.SimpleQueue()
        self._outstanding: list[deque[OwedResult]] = [deque() for _ in range(self.world_size)]
        self._own_calls: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True)]
        for rank in range(1, self.world_size):
            self._threads.append(threading.Thread(target=self._listen, args=(rank,), daemon=True))
        for thread in self._threads:
            thread.start()
        self._resolve([self._send(rank, START, make_worker) for rank in range(self.world_size)])

    def is_alive(self, rank: int) -> bool:
        return self._ended is None

    def shutdown(self) -> None:
        if self._ended is not None:
            return
        self._ended = "has been shut down"
        if any(self._outstanding) or isinstance(sys.exc_info()[1], KeyboardInterrupt):
            return  # Ctrl-C has ended the others, or torchrun will
        for rank in range(1, self.world_size):
            _send(self._control, rank, (STOP, None))
        self._own_calls.put((STOP, None))
        for thread in self._threads:  # what they hold must not outlive the process group
            thread.join(self.timeout_s)
        dist.barrier(self._control)
        dist.destroy_process_group()

    # ---- calls

    def _submit(
        self, rank: int, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> OwedResult:
        return self._send(rank, method_name, (tuple(args), dict(kwargs)))

    def _send(self, rank: int, method: str, payload: Any) -> OwedResult:
        self._check_usable()
        result = OwedResult(self, method)
        self._outstanding[rank].append(result)
        if rank == 0:
            self._own_calls.put((method, payload))
        else:
            try:
                _send(self._control, rank, (method, payload))
            except RuntimeError:  # it is gone
                self._fail({rank: _death_of(rank, method)})
        return result

    def _resolve(self, pending: list[OwedResult]) -> list[Any]:
        self._wait_for(pending, self.timeout_s)
        return [result.value for result in pending]

    def _take_answers(self, timeout_s: float, failures: dict[int, RankFailure]) -> bool:
        try:
            rank, is_value, value = self._outcomes.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if not is_value:
            failures[rank] = value
            return True
        result = self._outstanding[rank].popleft()
        result.value, result.is_done = value, True
        return True

    # ---- threads of rank 0

    def _work(self) -> None:
        """The worker of rank 0, which the controller's thread does not wait for."""
        workers: list[Worker] = []
        while True:
            method, payload = self._own_calls.get()
            if method == STOP:
                return
            is_value, value = _perform(0, workers, method, payload)
            self._outcomes.put((0, is_value, value))

    def _listen(self, rank: int) -> None:
        """The results of another rank."""
        while True:
            try:
                is_value, value = _receive(self._control, rank)
            except RuntimeError:  # its process is gone, or this one is shutting down
                owed = self._outstanding[rank]
                self._outcomes.put((rank, False, _death_of(rank, owed[0].method if owed else "")))
                return
            self._outcomes.put((rank, is_value, value))
            if value == STOP:
                return

    # ---- failures

    def _collect(
        self, failures: Mapping[int, RankFailure], silent_s: float
    ) -> tuple[list[RankFailure], list[WaitingRank]]:
        waiting = [
            WaitingRank(rank, owed[0].method, ())
            for rank, owed in enumerate(self._outstanding)
            if owed and rank not in failures
        ]
        return list(failures.values()), waiting

    def _end(self, how: str) -> None:
        self._ended = how  # torchrun ends the ranks


def serve() -> None:
    """Answer the calls of rank 0, in any other rank, until that one ends."""
    control = _meet(None)
    rank = dist.get_rank()
    workers: list[Worker] = []
    while True:
        try:
            method, payload = _receive(control, 0)
        except RuntimeError:  # it is gone, and has told why
            sys.exit(1)
        if method == STOP:
            _send(control, 0, (True, STOP))
            dist.barrier(control)
            dist.destroy_process_group()
            return
        outcome = _perform(rank, workers, method, payload)
        del payload  # a waiting process should hold no batch
        _send(control, 0, outcome)


def _perform(rank: int, workers: list[Worker], method: str, payload: Any) -> tuple[bool, Any]:
    """(True, the result) or (False, how it failed)."""
    try:
        if method == START:
            workers.append(payload())
            return True, None
        args, kwargs = payload
        return True, call_method(workers[0], method, args, kwargs)
    except BaseException as error:  # noqa: BLE001  # whatever it is, rank 0 reports it
        return False, exception_failure(rank, method, error)


def _end_soon(signal_number: int, frame: object) -> None:
    timer = threading.Timer(TELLING_S, os._exit, (128 + signal_number,))
    timer.daemon = True
    timer.start()


def _death_of(rank: int, method: str) -> RankFailure:
    return RankFailure(rank, method, "its process is gone; torchrun reports how it ended")


# ---- meeting, and messages


def _meet(settings: _Settings | None) -> Any:
    """Join all ranks, as rank 0 tells; returns the group for calls and results."""
    meeting = dist.rendezvous("env://", timeout=FOREVER)  # type: ignore[attr-defined]
    store, rank, ranks = next(meeting)
    if settings is not None:
        store.set(SETTINGS, pickle.dumps(settings))
    store.wait([SETTINGS], FOREVER)  # rank 0 may have to read data first
    device, timeout_s = pickle.loads(store.get(SETTINGS))
    if sys.platform == "linux" and os.environ.get("LOCAL_WORLD_SIZE") == str(ranks):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no other machine has to get through
    if device.startswith("cuda"):
        _see_own_gpu()
    own = dist.PrefixStore("caldera/ranks", store)  # type: ignore[attr-defined]
    join_ranks(own, rank, ranks, device, timeout_s)
    return dist.new_group(backend="gloo", timeout=FOREVER)


def _see_own_gpu() -> None:
    """Let this process see the GPU of its local rank alone, as in other groups."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = listed.split(",") if listed else [str(i) for i in range(torch.cuda.device_count())]
    os.environ["CUDA_VISIBLE_DEVICES"] = names[int(os.environ["LOCAL_RANK"])]


def _send(control: Any, rank: int, message: Any) -> None:
    dist.send_object_list([message], rank, control)


def _receive(control: Any, rank: int) -> Any:
    messages: list[Any] = [None]
    dist.recv_object_list(messages, rank, control)
    return messages[0]
