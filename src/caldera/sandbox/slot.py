"""One slot: a warm, isolated interpreter, and the conversation with it."""

from __future__ import annotations

import itertools
import json
import math
import os
import selectors
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from caldera.errors import RewardError
from caldera.sandbox.isolation import (
    ENVIRONMENT,
    Method,
    command_line,
    find_interpreter,
    slot_user,
)
from caldera.sandbox.limits import Limits

Mode = Literal["run", "serve", "judge"]

SECONDS_TO_START = 30.0
SECONDS_TO_END = 5.0
MAX_MESSAGE_BYTES = 65536
CHUNK_BYTES = 65536

IsAbandoned = Callable[[], bool]
"""Whether nobody waits for the outcome any more. Asked again and again while a program waits for
its turn and while it runs; it may take its time."""

SECONDS_BETWEEN_LOOKS = 0.2
NOBODY_WAITS = "nobody waits for the program's outcome any more"


class Abandoned(RewardError):
    """The program was not run, or not to its end."""


class SlotDied(RewardError):
    """The slot does not answer. It has to be started anew."""


class Run:
    """A program in a slot: what is to be written to it and what it has written so far."""

    def __init__(self, identifier: int, limit: int) -> None:
        self.identifier = identifier
        self.limit = limit
        self.to_write: dict[int, memoryview] = {}
        self.to_read: dict[int, bytearray] = {}
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.report: dict[str, Any] | None = None  # set at its end
        self.too_much = False

    def write(self, end: int) -> None:
        try:
            written = os.write(end, self.to_write[end][:CHUNK_BYTES])
        except (BrokenPipeError, ConnectionResetError):  # it does not want to read any more
            self.to_write[end] = memoryview(b"")
        else:
            self.to_write[end] = self.to_write[end][written:]
        if not self.to_write[end]:
            del self.to_write[end]
            os.close(end)

    def read(self, end: int) -> None:
        buffer = self.to_read[end]
        try:
            chunk = os.read(end, CHUNK_BYTES)
        except ConnectionResetError:
            chunk = b""
        room = self.limit - len(buffer)
        self.too_much = self.too_much or len(chunk) > room
        buffer += chunk[:room]
        if not chunk:
            del self.to_read[end]
            os.close(end)

    def close(self) -> None:
        for end in (*self.to_write, *self.to_read):
            os.close(end)
        self.to_write.clear()
        self.to_read.clear()


class Slot:
    """Starts at once; `close` ends it and everything in it."""

    def __init__(self, number: int, method: Method, interpreter: str | None) -> None:
        self._identifiers = itertools.count()
        user = slot_user(number)
        command = command_line(method, find_interpreter(interpreter, user))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by `close`
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                command,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
            )
        self.control.settimeout(SECONDS_TO_START)
        try:
            self.receive()
        except SlotDied:
            self.close()
            raise

    def start(
        self,
        mode: Mode,
        limits: Limits,
        payload: Mapping[str, Any],
        stdin: bytes = b"",
        channel: socket.socket | None = None,
    ) -> Run:
        """Start a program. `channel` is its line to the caller of its functions."""
        run = Run(next(self._identifiers), limits.output_bytes)
        payload_end, to_payload = os.pipe()
        stdin_end, to_stdin = os.pipe()
        from_stdout, stdout_end = os.pipe()
        from_stderr, stderr_end = os.pipe()
        run.to_write[to_payload] = memoryview(json.dumps(payload).encode())
        run.to_write[to_stdin] = memoryview(stdin)
        run.to_read = {from_stdout: run.stdout, from_stderr: run.stderr}
        for end in (to_payload, to_stdin, from_stdout, from_stderr):
            os.set_blocking(end, False)
        request = {**asdict(limits), "id": run.identifier, "mode": mode}
        theirs = [payload_end, stdin_end, stdout_end, stderr_end]
        given = [*theirs, *([channel.fileno()] if channel else [])]
        try:
            socket.send_fds(self.control, [json.dumps(request).encode()], given)
        except OSError as error:
            run.close()
            raise SlotDied(self._last_words()) from error
        finally:
            for end in theirs:
                os.close(end)
        return run

    def kill(self, run: Run) -> None:
        """Ask for its end and that of all it started; the report follows."""
        try:
            self.control.send(json.dumps({"kill": run.identifier}).encode())
        except OSError as error:
            raise SlotDied(self._last_words()) from error

    def receive(self) -> dict[str, Any]:
        """The next message of the slot's."""
        try:
            message = self.control.recv(MAX_MESSAGE_BYTES)
        except OSError as error:
            raise SlotDied(self._last_words()) from error
        if not message:
            raise SlotDied(self._last_words())
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip()
        return f"a sandbox's process ended: {words.splitlines()[-1] if words else 'without a word'}"

    def close(self) -> None:
        self.control.close()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


# ---- Programs and this process, until one of them is done or has used up its time


def exchange(
    slot: Slot,
    runs: Sequence[Run],
    seconds: float,
    is_done: Callable[[], bool],
    is_abandoned: IsAbandoned | None = None,
) -> bool:
    """Write, read and wait until `is_done`, then end all `runs`. False where time ran out.

    When this returns, no process of theirs is left, and all that they wrote has been read. Nor is
    one left when it raises Abandoned, since nobody waits for them any more.
    """
    deadline = time.monotonic() + seconds
    longest_step = math.inf if is_abandoned is None else SECONDS_BETWEEN_LOOKS
    abandoned = False
    try:
        while not is_done() and not any(run.too_much for run in runs):
            abandoned = is_abandoned is not None and is_abandoned()
            if abandoned or (left := deadline - time.monotonic()) <= 0:
                break
            _step(slot, runs, min(left, longest_step))
        in_time = is_done() or any(run.too_much for run in runs)
        _end(slot, runs)
        if abandoned:
            raise Abandoned(NOBODY_WAITS)
        return in_time
    finally:
        for run in runs:
            run.close()


def _end(slot: Slot, runs: Sequence[Run]) -> None:
    for run in runs:
        if run.report is None:
            slot.kill(run)
    deadline = time.monotonic() + SECONDS_TO_END
    while any(run.report is None or run.to_read for run in runs):
        if (left := deadline - time.monotonic()) <= 0:
            raise SlotDied("a sandbox's process does not answer")
        _step(slot, runs, left)


def _step(slot: Slot, runs: Sequence[Run], seconds: float) -> None:
    """One wait, and whatever became possible by it."""
    # A handful of descriptors: making the selector anew costs less than keeping it up to date.
    selector = selectors.PollSelector()
    selector.register(slot.control, selectors.EVENT_READ)
    for run in runs:
        for end in run.to_write:
            selector.register(end, selectors.EVENT_WRITE, run)
        for end in run.to_read:
            selector.register(end, selectors.EVENT_READ, run)
    for key, events in selector.select(seconds):
        if key.data is None:
            message = slot.receive()
            for run in runs:
                if run.identifier == message["id"]:
                    run.report = message
        elif events & selectors.EVENT_WRITE:
            key.data.write(key.fd)
        else:
            key.data.read(key.fd)
