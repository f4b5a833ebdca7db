"""A warm interpreter that forks one process tree per program and reports how it ended.

It never reads a program, its input or its tests: those go through pipes straight to the process
that needs them, so that nothing of one run lies in the memory of the next.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import tempfile
from dataclasses import dataclass
from typing import Any, NoReturn

from caldera.sandbox.inside import kernel
from caldera.sandbox.inside.program import run_program
from caldera.sandbox.inside.seccomp import install_filter

WORKING_FOLDER = "/box"
MAX_MESSAGE_BYTES = 65536
MAX_DESCRIPTORS = 5
NO_REPORT = 125  # exit status of a process that failed before it could say how
# Fast programs end before the first look, and a program cannot fill much memory between two.
SECONDS_BETWEEN_LOOKS = 0.03
# The modules that programs import most, so that they need not wait for them.
WARM_MODULES = (
    "bisect",
    "collections",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "io",
    "itertools",
    "math",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "struct",
    "time",
    "typing",
)


@dataclass
class Run:
    """A program that is running."""

    request: dict[str, Any]
    init: int  # the process whose end is the end of all of them
    init_descriptor: int
    report: int
    folder: str | None
    killed: str | None = None


def serve(control: socket.socket, in_namespaces: bool) -> None:
    """Until the other side closes, which ends this process and, with it, the namespaces."""
    for name in WARM_MODULES:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    if not in_namespaces:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # programs of the same user must not look in
    gc.collect()
    gc.freeze()
    Zygote(control, in_namespaces).run()


class Zygote:
    def __init__(self, control: socket.socket, in_namespaces: bool) -> None:
        self.control = control
        self.in_namespaces = in_namespaces
        self.runs: dict[int, Run] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)

    def run(self) -> None:
        self._send({"ready": True})
        while True:
            events = self.selector.select(SECONDS_BETWEEN_LOOKS if self.runs else None)
            for key, _ in events:
                if key.data is not None:
                    self._finish(key.data)
                elif not self._receive():
                    self._give_up()
                    return
            if not events and self.in_namespaces:
                self._look_at_memory()

    def _give_up(self) -> None:
        """End what is running: nobody waits for it, as after the end of a run that was killed."""
        for run in self.runs.values():
            _kill_group(run.init)
            os.waitpid(run.init, 0)
            if run.folder is not None:
                shutil.rmtree(run.folder, ignore_errors=True)

    def _send(self, message: dict[str, Any]) -> None:
        self.control.send(json.dumps(message).encode())

    def _receive(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(
            self.control, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS
        )
        if not message:
            return False
        request = json.loads(message)
        if "kill" in request:
            self._kill(request["kill"], "asked")
        else:
            self._start(request, descriptors)
        return True

    def _start(self, request: dict[str, Any], descriptors: list[int]) -> None:
        report, report_end = os.pipe()
        folder = None if self.in_namespaces else tempfile.mkdtemp(prefix="caldera-sandbox-")
        flags = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS if self.in_namespaces else 0
        init = kernel.fork_into(flags)
        if init == 0:
            try:
                self.control.close()
                _be_init(request, descriptors, folder, report_end)
            finally:  # whatever happened: this process must never go on as a zygote
                os._exit(NO_REPORT)
        for end in (report_end, *descriptors):
            os.close(end)
        run = Run(request, init, os.pidfd_open(init), report, folder)
        self.runs[request["id"]] = run
        self.selector.register(run.init_descriptor, selectors.EVENT_READ, run)

    def _kill(self, identifier: int, reason: str) -> None:
        run = self.runs.get(identifier)
        if run is not None and run.killed is None:
            run.killed = reason
            os.kill(run.init, signal.SIGKILL)

    def _finish(self, run: Run) -> None:
        self.selector.unregister(run.init_descriptor)
        if not self.in_namespaces:  # in namespaces, init's end was everybody's
            _kill_group(run.init)
        _, _, usage = os.wait4(run.init, 0)
        with open(run.report, "rb") as file:
            report = json.loads(file.read() or b"{}")
        os.close(run.init_descriptor)
        if run.folder is not None:
            shutil.rmtree(run.folder, ignore_errors=True)
        del self.runs[run.request["id"]]
        cpu_seconds = usage.ru_utime + usage.ru_stime
        self._send(
            {"id": run.request["id"], "killed": run.killed, "cpu_seconds": cpu_seconds, **report}
        )

    def _look_at_memory(self) -> None:
        """Each process has its own limit. This one is for all of a program's together."""
        used = _resident_mebibytes([run.init for run in self.runs.values()])
        for run in list(self.runs.values()):
            if used.get(run.init, 0) > run.request["memory_mb"]:
                self._kill(run.request["id"], "memory")


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _resident_mebibytes(inits: list[int]) -> dict[int, float]:
    """Memory of the processes in each init's namespace, by init."""
    namespaces = {}
    for init in inits:
        try:
            namespaces[os.readlink(f"/proc/{init}/ns/pid")] = init
        except OSError:  # it has ended
            continue
    used = dict.fromkeys(inits, 0.0)
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            owner = namespaces.get(os.readlink(f"/proc/{process}/ns/pid"))
            if owner is not None:
                used[owner] += _resident_kibibytes(process) / 1024
        except OSError:  # it has ended
            continue
    return used


def _resident_kibibytes(process: str) -> int:
    """Its share of pages that several processes use, and no pages of files."""
    total = 0
    with open(f"/proc/{process}/smaps_rollup", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1])
    return total


def _be_init(
    request: dict[str, Any], descriptors: list[int], folder: str | None, report: int
) -> NoReturn:
    """The first process of the program's namespace: it starts the program and outlives it."""
    message: dict[str, Any]
    try:
        os.setsid()
        if folder is None:
            # The program gets no /proc: what the host is made of is none of its business.
            kernel.unmount("/proc")
            options = f"size={request['disk_mb']}m,nr_inodes=10000,mode=700"
            flags = kernel.MS_NOSUID | kernel.MS_NODEV
            kernel.mount("box", WORKING_FOLDER, "tmpfs", flags, options)
        else:
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        os.chdir(folder or WORKING_FOLDER)
        kernel.drop_capabilities()
        install_filter(in_namespaces=folder is None)
        child = os.fork()
        if child == 0:
            try:
                os.close(report)
                run_program(request, descriptors)
            finally:
                os._exit(NO_REPORT)
        for end in descriptors:
            os.close(end)
        while True:  # whatever loses its parent becomes a child of this one
            process, status = os.wait()
            if process == child:
                break
        message = {"exit": os.waitstatus_to_exitcode(status)}
    except OSError as error:
        message = {"error": str(error)}
    os.write(report, json.dumps(message).encode())
    os._exit(0)
