"""The sandbox: a pool of warm slots, each of which runs one program at a time."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Generic, Self, TypeVar

from caldera.errors import ConfigError, DataError, RewardError, UnsupportedError
from caldera.sandbox.inside.wire import decode, encode
from caldera.sandbox.isolation import METHODS, Method
from caldera.sandbox.limits import Limits, Outcome, Status
from caldera.sandbox.slot import (
    NOBODY_WAITS,
    SECONDS_BETWEEN_LOOKS,
    Abandoned,
    IsAbandoned,
    Run,
    Slot,
    SlotDied,
    exchange,
)

# ---- The next free slot goes to the oldest request that still wants it

T = TypeVar("T")


class Turns(Generic[T]):
    """Things that one thread at a time may use."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._free: deque[T] = deque()
        self._waiting: deque[object] = deque()

    def take(self, is_abandoned: IsAbandoned | None = None) -> T:
        """Wait for one. Raises Abandoned, and leaves the queue, where nobody wants it any more."""
        me, step = object(), None if is_abandoned is None else SECONDS_BETWEEN_LOOKS
        with self._changed:
            self._waiting.append(me)
        try:
            while True:
                with self._changed:
                    if self._changed.wait_for(lambda: self._free and self._waiting[0] is me, step):
                        return self._free.popleft()
                if is_abandoned is not None and is_abandoned():
                    raise Abandoned(NOBODY_WAITS)
        finally:
            with self._changed:
                self._waiting.remove(me)
                self._changed.notify_all()

    def give(self, thing: T) -> None:
        with self._changed:
            self._free.append(thing)
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        return len(self._waiting)


class Sandbox:
    """Runs programs that nobody has read. All methods may be called from several threads.

    `isolation`: "bubblewrap" or "namespaces"; by default the first of them that works here. Where
    neither does, the sandbox refuses to start, unless `allow_unsafe` says that limits and a filter
    of system calls are enough: programs then read the files that their user may read.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        slots: int = 2,
        *,
        isolation: Method | None = None,
        interpreter: str | None = None,
        allow_unsafe: bool = False,
    ) -> None:
        if slots < 1:
            raise ConfigError(f"slots={slots} must be at least 1")
        self.limits = limits or Limits()
        self.slots = slots
        self._interpreter = interpreter
        self._closed = False
        self._idle: Turns[tuple[int, Slot | None]] = Turns()
        self.isolation, first = _first_that_works(isolation, interpreter, allow_unsafe)
        self._idle.give((0, first))
        for number in range(1, slots):
            self._idle.give((number, None))  # started when it is first needed

    # ------------------------------------------------------------------ programs

    def run(
        self,
        program: str,
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        is_abandoned: IsAbandoned | None = None,
    ) -> Outcome:
        """Run a program as `python main.py` would, with `files` in its working folder.

        Its time begins when it gets a slot. Where `is_abandoned` comes true before its end, it is
        dropped or killed, and this raises Abandoned.
        """
        limits = limits or self.limits
        payload = {"program": program, "files": _encoded_files(files or {})}

        def use(slot: Slot) -> Outcome:
            start = time.monotonic()
            run = slot.start("run", limits, payload, stdin.encode(errors="surrogatepass"))
            in_time = exchange(
                slot, [run], limits.wall_seconds, lambda: run.report is not None, is_abandoned
            )
            return _outcome(run, in_time, time.monotonic() - start)

        return self._with_slot(use, is_abandoned)

    def call(
        self,
        program: str,
        function: str,
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
    ) -> Outcome:
        """The value of a function that the program defines, or of a method: `Solution.solve`.

        Arguments and value are plain data: numbers, strings, bytes, and containers of these.
        """
        limits = limits or self.limits
        request = {
            "function": function,
            "arguments": encode(tuple(arguments), _no_reference),
            "keywords": encode(dict(keywords or {}), _no_reference),
        }

        def use(slot: Slot) -> Outcome:
            start = time.monotonic()
            ours, theirs = socket.socketpair()
            with ours, theirs:
                run = slot.start("serve", limits, {"program": program, "files": {}}, b"", theirs)
                ours.setblocking(False)
                run.to_read[os.dup(ours.fileno())] = reply = bytearray()
                run.to_write[ours.detach()] = memoryview(json.dumps(request).encode() + b"\n")
            in_time = exchange(
                slot, [run], limits.wall_seconds, lambda: run.report is not None or b"\n" in reply
            )
            return _with_value(_outcome(run, in_time, time.monotonic() - start), bytes(reply))

        return self._with_slot(use)

    def check(
        self,
        program: str,
        tests: str,
        limits: Limits | None = None,
        is_abandoned: IsAbandoned | None = None,
    ) -> Outcome:
        """Whether `tests`, a program of assertions, passes on what `program` defines.

        The tests run in a separate process and ask the program's for values. The program sees
        arguments, never an expected value, and cannot touch what compares them. `is_abandoned` as
        in `run`.
        """
        limits = limits or self.limits

        def use(slot: Slot) -> Outcome:
            start = time.monotonic()
            of_program, of_tests = socket.socketpair()
            with of_program, of_tests:
                payload = {"program": program, "files": {}}
                tested = slot.start("serve", limits, payload, b"", of_program)
                try:
                    payload = {"program": tests, "files": {}}
                    judge = slot.start("judge", limits, payload, b"", of_tests)
                except SlotDied:
                    tested.close()
                    raise
            # If the program ends first, the tests are left without a reply and end as well.
            in_time = exchange(
                slot,
                [tested, judge],
                limits.wall_seconds,
                lambda: judge.report is not None,
                is_abandoned,
            )
            return _verdict(tested, judge, in_time, time.monotonic() - start)

        return self._with_slot(use, is_abandoned)

    def run_many(
        self, programs: Iterable[tuple[str, str]], limits: Limits | None = None
    ) -> list[Outcome]:
        """`run` for each (program, standard input), over all slots; the outcomes are in order."""
        with ThreadPoolExecutor(self.slots) as threads:
            return list(threads.map(lambda job: self.run(job[0], job[1], limits=limits), programs))

    # ------------------------------------------------------------------ slots

    @property
    def waiting(self) -> int:
        """Programs that wait for a slot, first come, first served."""
        return self._idle.waiting

    def _with_slot(
        self, use: Callable[[Slot], Outcome], is_abandoned: IsAbandoned | None = None
    ) -> Outcome:
        number, slot = self._idle.take(is_abandoned)
        try:
            if self._closed:
                raise RewardError("the sandbox is closed")
            if slot is None:
                slot = Slot(number, self.isolation, self._interpreter)
            try:
                return use(slot)
            except SlotDied as error:
                slot.close()
                slot = None  # the next program gets a new one
                return Outcome("failed", stderr=str(error))
        finally:
            self._idle.give((number, slot))

    def close(self) -> None:
        """Wait for the programs that are running, then end all slots."""
        if self._closed:
            return
        self._closed = True
        for _ in range(self.slots):
            _, slot = self._idle.take()
            if slot is not None:
                slot.close()
        self._idle.give((0, None))  # for those who still wait for their turn, one after the other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _first_that_works(
    wanted: Method | None, interpreter: str | None, allow_unsafe: bool
) -> tuple[Method, Slot]:
    if wanted is not None and wanted not in METHODS:
        raise ConfigError(f"isolation={wanted!r} is not one of {', '.join(METHODS)}")
    if wanted == "none" and not allow_unsafe:
        raise ConfigError("isolation='none' isolates nothing: it needs allow_unsafe=True")
    complaints = []
    for method in METHODS if wanted is None else (wanted,):
        if method == "none" and not allow_unsafe:
            continue
        try:
            return method, Slot(0, method, interpreter)
        except (ConfigError, SlotDied) as error:
            complaints.append(f"{method}: {error}")
    raise UnsupportedError(
        "Programs cannot be isolated on this machine, so none will be run. It needs bubblewrap or "
        "user namespaces. allow_unsafe=True runs them with limits and a filter of system calls "
        f"alone. Tried {'; '.join(complaints)}"
    )


def _no_reference(value: Any) -> Any:
    raise RewardError(f"a {type(value).__name__} is not plain data: a program cannot be given it")


def _encoded_files(files: Mapping[str, bytes]) -> dict[str, str]:
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise DataError(f"{name!r} is not the name of a file in a program's folder")
    return {name: base64.b64encode(content).decode() for name, content in files.items()}


def _status(run: Run, in_time: bool, exit_code: int | None) -> Status:
    report = run.report or {}
    if run.too_much:
        return "output limit"
    if not in_time or exit_code == -signal.SIGXCPU:
        return "timed out"
    if report.get("killed") == "memory":
        return "out of memory"
    if exit_code == 0:
        return "ok"
    last_line = run.stderr.rstrip().rpartition(b"\n")[2]
    return "out of memory" if last_line.startswith(b"MemoryError") else "failed"


def _outcome(run: Run, in_time: bool, seconds: float) -> Outcome:
    report = run.report or {}
    if "error" in report:
        raise RewardError(f"the sandbox could not start a program: {report['error']}")
    exit_code = report.get("exit")
    return Outcome(
        _status(run, in_time, exit_code),
        run.stdout.decode(errors="replace"),
        run.stderr.decode(errors="replace"),
        exit_code,
        seconds,
    )


def _with_value(outcome: Outcome, reply: bytes) -> Outcome:
    """The outcome of a call; the reply is the program's, so it may be anything."""
    line, newline, _ = reply.partition(b"\n")
    if outcome.status in ("output limit", "timed out", "out of memory"):
        return outcome
    try:
        if not newline:
            raise ValueError("no reply")
        answer = json.loads(line)
        if "missing" in answer:
            raised = f"NameError: the program defines no {answer['missing']!r}"
            return replace(outcome, status="failed", raised=raised)
        if "raised" in answer:
            raised = f"{answer['raised']}: {answer['message']}"
            return replace(outcome, status="failed", raised=raised)
        return replace(outcome, status="ok", value=decode(answer["value"], _refuse_reference))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        return replace(outcome, status="failed", raised=f"not a value: {error}")


def _refuse_reference(reference: Any) -> Any:
    raise ValueError("it is not plain data")


def _verdict(tested: Run, judge: Run, in_time: bool, seconds: float) -> Outcome:
    of_program = _outcome(tested, in_time, seconds)
    of_tests = _outcome(judge, in_time, seconds)
    if of_tests.status == "ok" and not tested.too_much:
        return replace(of_program, status="ok", exit_code=0)
    raised = of_tests.stderr.rstrip().rpartition("\n")[2] or None
    status = "failed" if of_program.status == "ok" else of_program.status
    return replace(of_program, status=status, raised=raised)
