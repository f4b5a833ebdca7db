"""One program in a separate process: standard streams, limits, and the end of an interpreter."""

from __future__ import annotations

import atexit
import base64
import builtins
import io
import json
import os
import resource
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

from caldera.sandbox.inside.serving import answer_calls
from caldera.sandbox.inside.testing import run_tests

MEBIBYTE = 2**20
# Processes of the slot that stand beside the program's own and count towards the same limit.
PROCESSES_OF_THE_SANDBOX = 8
FIRST_FREE_FD = 3
SHOWN_FRAMES = 50  # of a traceback, the last ones


def run_program(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Never returns. `descriptors`: payload, standard input, output, error and, maybe, channel."""
    payload_end, *streams = descriptors
    with open(payload_end, "rb") as file:
        payload = json.loads(file.read())
    channel = _arrange(streams)
    for name, content in payload["files"].items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "wb") as file:
            file.write(base64.b64decode(content))
    _set_limits(request)
    os._exit(_status_of(lambda: _run(request["mode"], payload, channel)))


def _arrange(streams: list[int]) -> int:
    """The streams become the descriptors 0 to 2, the channel 3; all others are closed."""
    moved = [os.dup2(end, 64 + index) for index, end in enumerate(streams)]
    for target, end in enumerate(moved):
        os.dup2(end, target)
    os.closerange(len(moved), 256)
    buffers = io.FileIO(0), io.FileIO(1, "w"), io.FileIO(2, "w")
    own = {
        "stdin": io.TextIOWrapper(io.BufferedReader(buffers[0]), "utf-8", "surrogateescape"),
        "stdout": io.TextIOWrapper(io.BufferedWriter(buffers[1]), "utf-8", "surrogateescape"),
        "stderr": io.TextIOWrapper(
            io.BufferedWriter(buffers[2]), "utf-8", "backslashreplace", line_buffering=True
        ),
    }
    for name, stream in own.items():
        vars(sys)[name] = vars(sys)[f"__{name}__"] = stream
    return FIRST_FREE_FD


def _set_limits(request: dict[str, Any]) -> None:
    memory, disk = request["memory_mb"] * MEBIBYTE, request["disk_mb"] * MEBIBYTE
    seconds = request["cpu_seconds"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_NOFILE, request["open_files"]),
        (resource.RLIMIT_NPROC, request["processes"] + PROCESSES_OF_THE_SANDBOX),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(kind, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def _run(mode: str, payload: dict[str, Any], channel: int) -> None:
    if mode == "run":
        _execute(payload["program"], "__main__")
        return
    connection = (
        io.BufferedReader(io.FileIO(channel)),
        io.BufferedWriter(io.FileIO(os.dup(channel), "w")),
    )
    if mode == "serve":
        # Not as __main__: a program that is asked for its functions need not run its own main.
        answer_calls(_execute(payload["program"], "solution"), *connection)
    else:
        run_tests(payload["program"], *connection)


def _execute(source: str, name: str) -> dict[str, Any]:
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    sys.modules[name] = module
    sys.argv = ["main.py"]
    # Named by the traceback; its lines are not in a file that the traceback could show.
    exec(compile(source, "main.py", "exec"), module.__dict__)
    return module.__dict__


def _status_of(body: Callable[[], None]) -> int:
    """Run to the end as the interpreter does: exceptions, threads, atexit, buffers."""
    status = 0
    try:
        body()
    except SystemExit as exit_:
        status = _exit_status(exit_.code)
    except BaseException:  # noqa: BLE001 -- whatever the program raised ends the program
        _show_error()
        status = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 -- the program may have replaced any of these
        status = status or 120  # as the interpreter's own status when it cannot flush
    return status


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    os.write(2, f"{code}\n".encode(errors="backslashreplace"))
    return 1


def _show_error() -> None:
    kind, error, trace = sys.exc_info()
    while trace and trace.tb_frame.f_code.co_filename == "<inside>":
        trace = trace.tb_next  # begin with the program's own lines
    try:
        text = "".join(traceback.format_exception(kind, error, trace, -SHOWN_FRAMES))
    except BaseException:  # noqa: BLE001 -- an exception may have a __str__ of the program's
        text = "the program raised an exception that cannot be shown\n"
    os.write(2, text.encode(errors="backslashreplace"))
