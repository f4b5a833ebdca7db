"""Processes that need not import anything: copies of one that has imported it all.

`python warm_server.py SOCKET` imports what runs need, and then forks for every command that
warm_client.py sends it: `-m MODULE ARGUMENTS`, with the client's folder, environment and standard
streams. That saves each of them seconds of imports; all else is as in a process of its own, but for
variables that the interpreter or a library reads once: those are the ones of this server.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver

import numpy

IMPORTED = (
    "caldera.cli", "caldera.trainer.ppo.setup", "caldera.trainer.sft", "pyarrow.dataset",
    "pyarrow.parquet", "torch.distributed.checkpoint", "transformers.models.llama.modeling_llama",
)  # fmt: skip
PR_SET_PDEATHSIG = 1
MOST = 1 << 20
"""Bytes of a command and its environment."""


@dataclass(frozen=True)
class Command:
    arguments: list[str]
    folder: str
    environment: dict[str, str]


@dataclass(frozen=True)
class Running:
    client: socket.socket
    pid: int
    end: int
    """A file that can be read once the process has ended."""


class Server:
    """Lives as long as its standard input is open."""

    def __init__(self, path: str) -> None:
        self._pid = os.getpid()
        self._library = ctypes.CDLL(None)
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"{path}.new")
        self._listener.listen()
        os.rename(f"{path}.new", path)  # whoever sees it there can connect
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)

    def wait_for_command(self) -> Command | None:
        """Returns in each copy with what it is to do, and here with None in the end."""
        while True:
            key = self._selector.select()[0][0]  # one at a time: it may concern the others
            if key.fd == 0:
                for other in self._selector.get_map().values():
                    if other.data:
                        os.kill(other.data.pid, signal.SIGKILL)
                return None
            if key.fileobj is self._listener:
                if command := self._accept():
                    return command
            elif key.fd == key.data.end:
                self._tell_end(key.data)
            else:  # a client says no more than its command: it was killed
                self._selector.unregister(key.fileobj)
                os.kill(key.data.pid, signal.SIGKILL)

    def _accept(self) -> Command | None:
        client, _ = self._listener.accept()
        message, streams, _, _ = socket.recv_fds(client, MOST, 3)
        if pid := os.fork():
            running = Running(client, pid, os.pidfd_open(pid))
            self._selector.register(running.end, selectors.EVENT_READ, running)
            self._selector.register(client, selectors.EVENT_READ, running)
            with suppress(OSError):  # it is gone, which is seen next
                client.sendall(b"%d" % pid)
        else:
            self._die_with_server()
            self._close()
            client.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
        for stream in streams:
            os.close(stream)
        return None if pid else Command(**json.loads(message))

    def _die_with_server(self) -> None:
        assert self._library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) == 0
        if os.getppid() != self._pid:  # it died before
            os._exit(1)

    def _tell_end(self, running: Running) -> None:
        _, status = os.waitpid(running.pid, 0)
        self._selector.unregister(running.end)
        os.close(running.end)
        if running.client in self._selector.get_map():
            self._selector.unregister(running.client)
            with suppress(OSError):
                running.client.sendall(b"%d" % os.waitstatus_to_exitcode(status))
        running.client.close()

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            elif key.fd:
                os.close(key.fd)
        self._selector.close()


def main() -> None:
    own = [os.path.dirname(__file__), *os.environ["PYTHONPATH"].split(os.pathsep)]
    installed = [path for path in sys.path if path not in own]
    sys.path[:0] = own[1:]
    for name in IMPORTED:
        importlib.import_module(name)
    _start_fork_server()
    _load_a_config()
    gc.collect()
    gc.freeze()
    command = Server(sys.argv[1]).wait_for_command()
    if command is None:
        return
    _keep_fork_server()
    os.chdir(command.folder)
    os.environ.clear()
    os.environ.update(command.environment)
    tempfile.tempdir = None  # may be another one by this environment
    numpy.random.seed()  # or all copies would draw the same numbers
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [command.folder, *given, *installed]
    option, module, *sys.argv[1:] = command.arguments
    assert option == "-m", command.arguments
    sys.orig_argv[1:] = command.arguments
    sys.modules.pop(module, None)  # it is going to be __main__
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _start_fork_server() -> None:
    """Runs of several ranks share one server of processes, which has imported what ranks need."""
    from caldera.single_controller.processes import PRELOADED

    forkserver.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def _load_a_config() -> None:
    """The first one takes longer than others: its grammar is worked out on the way."""
    from caldera.config import PPOTrainerConfig, compose_config

    compose_config([], "ppo_trainer", None, PPOTrainerConfig)


def _keep_fork_server() -> None:
    """It runs as long as the warm server does. Only its parent could ask the system whether."""
    vars(forkserver._forkserver)["ensure_running"] = forkserver.ensure_running = lambda: None


if __name__ == "__main__":
    main()
