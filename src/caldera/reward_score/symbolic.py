"""Symbolic equality of mathematical expressions, by math-verify in a process of its own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import threading

from caldera.errors import ConfigError, RewardError
from caldera.installation import install_command

CPU_SECONDS = 0.5  # a comparison takes some 0.03; without a limit, sympy may take for ever
SERVER = "caldera.reward_score.symbolic_server"


def equal(answer: str, reference: str, cpu_seconds: float = CPU_SECONDS) -> bool:
    """Whether two LaTeX expressions are equal.

    False too for what math-verify cannot read or decide within `cpu_seconds` of processor time
    (and within twenty times as many seconds in all). May be called from any thread or process.
    """
    require_math_verify()
    with _lock:
        if not _servers:
            _servers.append(Server())
        return _servers[0].equal(answer, reference, cpu_seconds)


@functools.cache
def require_math_verify() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "symbolic comparison of mathematical answers needs math-verify, which is not "
            f"installed: {install_command('math')}"
        )


class Server:
    """A process that compares expressions. It ends with this one: it reads until its input ends."""

    def __init__(self) -> None:
        paths = [path or os.getcwd() for path in sys.path]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        atexit.register(self.stop, os.getpid())
        self._read()  # it is ready, and knows nothing else to say

    def equal(self, answer: str, reference: str, cpu_seconds: float) -> bool:
        request = {"answer": answer, "reference": reference, "cpu_seconds": cpu_seconds}
        assert self.process.stdin is not None, "it was opened as a pipe"
        with contextlib.suppress(BrokenPipeError):  # reading will find that it ended
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        return self._read() == "equal"

    def _read(self) -> str:
        assert self.process.stdout is not None, "it was opened as a pipe"
        line = self.process.stdout.readline()
        if not line:
            _servers.clear()  # so that the next call starts another
            self.process.communicate()
            raise RewardError(
                "the process that runs math-verify ended with status "
                f"{self.process.returncode}; what it wrote to stderr says why"
            )
        return line.strip()

    def stop(self, owner: int) -> None:
        if os.getpid() == owner and self.process.poll() is None:
            self.process.kill()  # a comparison that still runs ends by its own limits
            self.process.communicate()


_servers: list[Server] = []  # one, or none yet
_lock = threading.Lock()


def _begin_anew() -> None:
    """In a forked process, which must not read its parent's answers, and where a thread that held
    the lock no longer exists to release it."""
    global _lock
    _lock = threading.Lock()
    _servers.clear()


os.register_at_fork(after_in_child=_begin_anew)
