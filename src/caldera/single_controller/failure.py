"""The message when a worker fails: one screen, with the first failure on top.

A rank fails by an exception, by the death of its process or by silence. Its peers then mostly wait
in a collective, or fail there because the rank is gone: they are reported after it.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
import traceback
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from caldera.errors import WorkerError
from caldera.single_controller.dispatching import Pending
from caldera.single_controller.worker_group import WorkerGroup

FRAMES_SHOWN = 8
LOG_LINES_SHOWN = 10
SECONDS_FOR_A_STACK = 3.0
STACK_FILE_HEAD = "main thread 0x"
"""How the file begins into which a process dumps its stacks; the thread's number follows."""
_OWN_FOLDER = os.path.dirname(__file__)
_PROCESS_MAIN = os.path.join(_OWN_FOLDER, "process_main.py")
_COLLECTIVES = os.path.join("torch", "distributed") + os.sep

_LIKELY_CAUSES: dict[int, str] = {
    signal.SIGKILL: " (as the kernel does when memory runs out)",
    signal.SIGBUS: " (as when /dev/shm is full: see docker's --shm-size)",
}

BEFORE_FIRST_ANSWER = 12
"""Timeouts that a call may take until its first rank answers: two hours, by default."""


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed."""

    rank: int
    method: str
    """Which call; empty if there was none."""
    what: str
    """In a line, such as "ValueError: negative length" or "killed by SIGKILL"."""
    details: tuple[str, ...] = ()
    """The last frames of the exception, or the last lines of the log."""
    log: str | None = None
    in_collective: bool = False
    """Most likely the consequence of another rank's failure."""
    at: float = field(default_factory=time.monotonic)
    """When; the clock is one for all processes of a machine."""


@dataclass(frozen=True)
class WaitingRank:
    """A rank that was still in a call when another failed."""

    rank: int
    method: str
    stack: tuple[str, ...]
    """Its frames, the innermost last."""
    log: str | None = None


def exception_failure(
    rank: int, method: str, error: BaseException, log: str | None = None
) -> RankFailure:
    """The failure of a rank in which a call raised."""
    frames = traceback.extract_tb(error.__traceback__)
    text = "".join(traceback.format_exception_only(error)).strip()
    shown = [frame for frame in frames if not frame.filename.startswith(_OWN_FOLDER)]
    lines = "".join(traceback.format_list(shown[-FRAMES_SHOWN:])).splitlines()
    in_collective = any(_COLLECTIVES in frame.filename for frame in frames)
    in_collective |= isinstance(error, RuntimeError) and bool(re.search("gloo|nccl", text, re.I))
    return RankFailure(rank, method, text, tuple(lines), log, in_collective)


def exit_failure(rank: int, method: str, exit_code: int | None, log: str) -> RankFailure:
    """The failure of a rank whose process is gone."""
    if exit_code is None:
        what = "its process closed the connection"
    elif exit_code >= 0:
        what = f"its process exited with status {exit_code}"
    else:
        what = f"its process was killed by {_signal_name(-exit_code)}"
        what += _LIKELY_CAUSES.get(-exit_code, "")
    return RankFailure(rank, method, what, last_lines(log), log)


def silence_failure(waiting: Sequence[WaitingRank], timeout_s: float) -> RankFailure:
    """The failure of ranks that do not answer: of the one that keeps the others waiting."""
    # A rank inside a collective waits for one that is not.
    first = next((w for w in waiting if not _in_collective(w.stack)), waiting[0])
    what = f"no answer for {timeout_s:g} s"
    return RankFailure(first.rank, first.method, what, first.stack, first.log)


def first_failure(failures: Iterable[RankFailure]) -> RankFailure:
    """The earliest failure that is not the consequence of another."""
    return min(failures, key=lambda failure: (failure.in_collective, failure.at))


def worker_error(
    group: str, world_size: int, failures: Sequence[RankFailure], waiting: Sequence[WaitingRank]
) -> WorkerError:
    """The error of a group, whose message is the whole screen."""
    first = first_failure(failures)
    lines = [f"worker group {group}: rank {first.rank} of {world_size} failed {_during(first)}"]
    lines += _indented([*first.what.splitlines(), *first.details], first.log)
    for failure in sorted(failures, key=lambda failure: failure.at):
        if failure is not first:
            lines.append(f"rank {failure.rank} failed {_during(failure)} as well")
            lines += _indented(failure.what.splitlines(), failure.log)
    for rank in waiting:
        if rank.rank not in {failure.rank for failure in failures}:
            lines.append(f"rank {rank.rank} was still in {rank.method}")
            lines += _indented(rank.stack or ["(it showed no stack)"], rank.log)
    lines.append("All ranks of the group have been ended.")
    return WorkerError("\n".join(lines))


def request_stack(pid: int, stack_file: Path) -> tuple[str, ...]:
    """The stack of another process's main thread, which dumps it when it gets SIGUSR1."""
    head, _, before = stack_file.read_text(errors="replace").partition("\n")
    if not head.startswith(STACK_FILE_HEAD):  # not ready: the signal would end it
        return ()
    try:
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        return ()
    dump, deadline = "", time.monotonic() + SECONDS_FOR_A_STACK
    while time.monotonic() < deadline:
        time.sleep(0.05)
        text = stack_file.read_text(errors="replace").partition("\n")[2]
        last, dump = dump, text[len(before) :]
        if dump and dump == last:
            break
    return _frames_of(dump, head.removeprefix(STACK_FILE_HEAD))


def _frames_of(dump: str, thread: str) -> tuple[str, ...]:
    """The innermost frames of a thread in what `faulthandler` wrote, the innermost last."""
    blocks = re.split(r"^(?:Current thread|Thread) 0x0*([0-9a-f]+).*\n", dump, flags=re.M)
    by_thread = dict(zip(blocks[1::2], blocks[2::2], strict=True))
    frames = [line for line in by_thread.get(thread, "").splitlines() if "File" in line]
    inner = itertools.takewhile(lambda line: _PROCESS_MAIN not in line, frames)
    shown = [line for line in inner if _OWN_FOLDER not in line]
    return tuple(reversed(shown[:FRAMES_SHOWN]))


def _in_collective(stack: Iterable[str]) -> bool:
    return any(_COLLECTIVES in line for line in stack)


def _during(failure: RankFailure) -> str:
    return f"in {failure.method}" if failure.method else "between calls"


def _signal_name(number: int) -> str:
    known = {member.value: member.name for member in signal.Signals}
    return known.get(number, f"signal {number}")


def last_lines(log: str) -> tuple[str, ...]:
    """The end of a log; that of a crash begins with the frames that `faulthandler` wrote."""
    text = Path(log).read_text(errors="replace") if Path(log).is_file() else ""
    crash = text.rpartition("Fatal Python error: ")[1:]
    if crash[0]:
        what, _, dump = "".join(crash).partition("\n")
        crashed_thread = dump.partition("Current thread ")[2].splitlines()
        return (what, *crashed_thread[1 : FRAMES_SHOWN + 1])
    return tuple(text.splitlines()[-LOG_LINES_SHOWN:])


def _indented(lines: Iterable[str], log: str | None) -> list[str]:
    return [f"  {line}" for line in [*lines, *([f"log: {log}"] if log else [])]]


def patience(timeout_s: float, somebody_answered: bool) -> float:
    """Seconds to wait for the next rank: long work is no failure, but once one rank has done its
    share the others should be near. Ranks that wait for each other time out by themselves."""
    return timeout_s if somebody_answered else timeout_s * BEFORE_FIRST_ANSWER


# ---- What worker groups in other processes have in common: they wait for results, and when a rank
# fails they look for the cause, end the group and raise one screen.


@dataclass(eq=False)
class OwedResult(Pending):
    """A result that a rank owes."""

    group: WorkerGroup
    method: str
    is_done: bool = False
    value: Any = None

    def result(self) -> Any:
        return self.group._resolve([self])[0]


class FailingGroup(WorkerGroup):
    """A group whose ranks may fail. Subclasses say how answers come and how the group ends."""

    grace_s = 0.5
    """How long to look for other failures once there is one, so that the first can be told."""
    long_grace_s = 5.0
    """The same when all failures look like the consequence of another."""
    _ended: str | None = None
    """How it has ended, if it has."""

    @abstractmethod
    def _take_answers(self, timeout_s: float, failures: dict[int, RankFailure]) -> bool:
        """Wait for any rank without a failure, and note results and failures; whether there was
        anything."""

    @abstractmethod
    def _collect(
        self, failures: Mapping[int, RankFailure], silent_s: float
    ) -> tuple[list[RankFailure], list[WaitingRank]]:
        """What there is to say of ranks that have failed, and of those still in a call."""

    @abstractmethod
    def _end(self, how: str) -> None:
        """End the group, with what it is to say from now on."""

    def _is_done(self, result: Any) -> bool:
        return bool(result.is_done)

    def _check_usable(self) -> None:
        if self._ended is not None:
            raise WorkerError(f"worker group {self.name} {self._ended}")

    def _wait_for(self, pending: Collection[Any], timeout_s: float) -> None:
        """Take results until these have come."""
        failures: dict[int, RankFailure] = {}
        while not all(map(self._is_done, pending)):
            self._check_usable()
            limit = patience(timeout_s, any(map(self._is_done, pending)))
            if not self._take_answers(limit, failures) or failures:
                self._fail(failures, limit)

    def _fail(self, failures: dict[int, RankFailure], silent_s: float = 0.0) -> NoReturn:
        """End the group and raise what happened; no failure means silence."""
        if failures:
            self._look_for_more(failures)
        found, waiting = self._collect(failures, silent_s)
        found = found or [silence_failure(waiting, silent_s)]
        error = worker_error(self.name, self.world_size, found, waiting)
        self._end("was ended after a failure")
        raise error

    def _look_for_more(self, failures: dict[int, RankFailure]) -> None:
        start = time.monotonic()
        while len(failures) < self.world_size:
            is_cause_known = not all(failure.in_collective for failure in failures.values())
            rest = start + (self.grace_s if is_cause_known else self.long_grace_s)
            if not self._take_answers(max(0.0, rest - time.monotonic()), failures):
                return
