"""The process of a rank: set up, build the worker, and serve calls until ended."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing.connection
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist

from caldera.seeds import seed_everything
from caldera.single_controller.failure import STACK_FILE_HEAD, exception_failure
from caldera.single_controller.transport import dumps, loads
from caldera.single_controller.worker import Worker, call_method

logger = logging.getLogger(__name__)

START = "__init__"
"""The name under which the building of the worker is reported."""
STOP = b""
"""The message that ends the process."""


@dataclass(frozen=True)
class RankSettings:
    """The settings of a process before it can be called."""

    rank: int
    world_size: int
    environment: Mapping[str, str]
    log: str
    stack_file: str
    threads: int
    device: str
    store_port: int
    timeout_s: float
    start_timeout_s: float
    seed: int
    controller_pid: int
    log_level: int


def loopback_store() -> Any:
    """Where the ranks of one machine meet. Torch's own socket would listen on all interfaces. The
    system chooses the port, which is held here: no other process can take it before the ranks."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def join_ranks(store: Any, rank: int, world_size: int, device: str, timeout_s: float) -> None:
    """Form the process group, of ranks that see their own GPU alone if they have one."""
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def open_stack_file(path: str) -> IO[str]:
    """The file into which this process dumps its stacks when it gets SIGUSR1, ready to be asked;
    to be kept open as long as the process is."""
    file = open(path, "a")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    file.write(f"{STACK_FILE_HEAD}{threading.get_ident():x}\n")
    file.flush()
    return file


def run_rank(settings: RankSettings, connection: Connection) -> None:
    """Answer calls, each by (True, value) or (False, failure), until `STOP` comes.

    After a failure the process waits to be ended: its exit would make peers fail that now wait for
    it, and they should be seen waiting.
    """
    stack_file = _set_up(settings)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(
        target=_listen, args=(connection, calls, settings.controller_pid), daemon=True
    ).start()
    worker: Worker | None = None
    while (message := calls.get()) != STOP:
        method, payload = pickle.loads(message)
        try:
            if method == START:
                worker = _start(settings, loads(payload))
                result: Any = None
            else:
                args, kwargs = loads(payload)
                assert worker is not None, "a group builds its workers first"
                result = call_method(worker, method, args, kwargs)
                del args, kwargs  # a waiting process should hold no batch
            reply = dumps((True, result))
            del result
        except BaseException as error:
            logger.exception("rank %d failed in %s", settings.rank, method)
            failure = exception_failure(settings.rank, method, error, settings.log)
            connection.send_bytes(dumps((False, failure)))
            threading.Event().wait()
        connection.send_bytes(reply)
    if worker is not None:
        worker.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    faulthandler.unregister(signal.SIGUSR1)
    stack_file.close()


def _set_up(settings: RankSettings) -> IO[str]:
    """Environment, output, threads, random numbers, and the dump of stacks on request."""
    os.setpgid(0, 0)  # so that what the worker starts can be ended with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # forgets a Ctrl-C that has come before
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(settings.environment)
    _redirect_output(settings.log)
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    faulthandler.enable()
    stack_file = open_stack_file(settings.stack_file)
    torch.set_num_threads(settings.threads)
    seed_everything(settings.seed + settings.rank)
    return stack_file


def _redirect_output(log: str) -> None:
    """Everything that this process and its libraries write goes to the log."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(file, number)
    os.close(file)
    for name, number in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115


def _listen(
    connection: Connection, calls: queue.SimpleQueue[bytes], controller_pid: int
) -> NoReturn:
    """Take calls, so that the controller never waits; without a controller end this process."""
    try:
        watched: list[Any] = [connection]
        if hasattr(os, "pidfd_open"):  # Linux: an inherited copy of the connection is no controller
            watched.append(os.pidfd_open(controller_pid))
        while True:
            if multiprocessing.connection.wait(watched) != [connection]:
                break
            calls.put(connection.recv_bytes())
    except (EOFError, OSError):
        pass
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _start(settings: RankSettings, make_worker: Callable[[], Worker]) -> Worker:
    """Join the other ranks, then build the worker."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", settings.store_port, is_master=False
    )
    if store.add("ranks", 1) == settings.world_size:
        store.set("complete", "")
    # Processes may need long to get here: only from here on do they have to be quick.
    store.wait(["complete"], timedelta(seconds=settings.start_timeout_s))
    join_ranks(store, settings.rank, settings.world_size, settings.device, settings.timeout_s)
    return make_worker()
