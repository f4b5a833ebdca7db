"""Calls of score functions, one a sample: many at once, none of them for ever.

A `Scoring` takes one call at a time and returns a future. A caller with a whole batch submits
all of its samples and waits; a caller with a sampler submits each sample when it is there.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import queue
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from caldera.errors import RewardError
from caldera.reward.explaining import explain, guard_exit, no_exit

logger = logging.getLogger(__name__)

SECONDS_FOR_A_SIGN = 1.0  # in which an event loop that is not blocked does what it is asked to
SLOW_SECONDS, SLOW_TIMES = 0.25, 10
"""A call is slow that takes longer than this, and so many times longer than calls do on average."""
FUNCTIONS, TIME_LIMITS = "score functions", "time limits of score functions"
"""Names of event loops."""
MOST_BESIDE = 1000  # slow calls that others do not wait for: threads cost little while they wait


@dataclass(frozen=True)
class ScoringLimits:
    """How long a call may take, and how many may run at once."""

    timeout: float | None = 300.0
    """Seconds; None: for ever."""
    num_workers: int | None = None
    """Threads or processes; None: as many as suit the manager."""


class CallTimeout(Exception):
    """A call that took longer than it may."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the score function took longer than {seconds:g} s")


class Scoring(Protocol):
    """Calls one score function, with the arguments of a sample."""

    def submit(self, arguments: Mapping[str, Any], name: str) -> Future[Any]:
        """The future of what the function returns; `name` stands for the sample in messages."""
        ...


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Call the function now; the future holds what it returned or raised, whatever that is."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 -- the future raises it
        future.set_exception(error)
    return future


class RunTime:
    """The seconds of a call that count towards its time limit: those in a queue do not."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._waited = 0.0
        self._since: float | None = None  # when the wait under way began
        self._lock = threading.Lock()
        self.is_over = False
        """Whether the call has been given up."""

    def stop(self) -> None:
        with self._lock:
            self._since = time.monotonic()

    def go_on(self, counted: float) -> None:
        """Of the time since `stop`, `counted` seconds were no wait."""
        with self._lock:
            assert self._since is not None, "it stands still"
            self._waited += max(0.0, time.monotonic() - self._since - counted)
            self._since = None

    def seconds(self) -> float:
        with self._lock:
            now = time.monotonic() if self._since is None else self._since
            return now - self._begun - self._waited


_run_time: ContextVar[RunTime | None] = ContextVar("run time of the call", default=None)


@contextmanager
def in_a_queue() -> Iterator[Callable[[float], None]]:
    """The time in here does not count towards the limit of the call that this thread is in: what is
    done has a separate limit, and may have to wait for its turn first. Gives a function that
    takes the seconds that were no wait, which do count."""
    clock = _run_time.get() or RunTime()
    if clock.is_over:
        raise RewardError("nobody waits for the score any more")
    counted: list[float] = []
    clock.stop()
    try:
        yield counted.append
    finally:
        clock.go_on(sum(counted))


class _Call:
    """A call that is answered once: by its function, or by the clock."""

    _awaiting: ClassVar[set[_Call]] = set()
    """Calls on the event loop, which does not keep what it runs from being garbage-collected."""

    def __init__(self, arguments: Mapping[str, Any], name: str) -> None:
        self.arguments = arguments
        self.name = name
        self.future: Future[Any] = Future()
        self._awaited: Future[Any] | None = None
        self._lock = threading.Lock()
        self._has_left_its_thread = False
        self._is_too_late = False
        self.clock: RunTime | None = None
        """Set when it begins."""
        # Of `ThreadScoring`, under its lock:
        self.begun = 0.0
        self.has_returned = False
        self.is_beside = False
        """Whether another thread has taken the place of the one that it is in."""

    def settle(self, done: Future[Any]) -> None:
        """Set the result."""
        with suppress(InvalidStateError):  # it was too late
            if done.cancelled():
                self.future.set_exception(asyncio.CancelledError())
            elif (error := done.exception()) is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(done.result())
        self._awaiting.discard(self)

    def leave_thread(self, returned: Future[Any]) -> bool:
        """Take what the function returned; False if the thread has been given up by then."""
        with self._lock:
            if self._is_too_late:
                return False
            self._has_left_its_thread = True
            if _is_awaitable(returned):
                self._awaiting.add(self)
                self._awaited = _EventLoop.named(FUNCTIONS).run(returned.result())
        if self._awaited is None:
            self.settle(returned)
        else:
            self._awaited.add_done_callback(self.settle)
        return True

    def expire(self, seconds: float) -> bool:
        """Set a timeout as the result; True if a thread is still at it."""
        with self._lock:
            if self.future.done():
                return False
            self._is_too_late = not self._has_left_its_thread
            if self.clock is not None:
                self.clock.is_over = True
            with suppress(InvalidStateError):
                self.future.set_exception(CallTimeout(seconds))
            if self._awaited is not None:
                self._awaiting.discard(self)
                self._awaited.cancel()
                _EventLoop.named(FUNCTIONS).replace_if_blocked(self.name)
            return self._is_too_late


def _is_awaitable(returned: Future[Any]) -> bool:
    if returned.exception() is not None:
        return False
    with no_exit():
        looked = attempt(inspect.isawaitable, returned.result())  # some raise when looked at
    return looked.exception() is None and bool(looked.result())


def _call_in_thread(function: Callable[..., Any], call: _Call) -> Any:
    _run_time.set(call.clock)
    try:
        with no_exit():
            return function(**call.arguments)
    except (SystemExit, KeyboardInterrupt) as error:
        # The function's own: Ctrl-C raises in the main thread, and no other.
        raise RewardError(explain(error)) from error


def _after(seconds: float, function: Callable[..., None], *args: Any) -> None:
    loop = _EventLoop.named(TIME_LIMITS).loop
    loop.call_soon_threadsafe(loop.call_later, seconds, function, *args)


class ThreadScoring:
    """Runs a function in daemon threads; what it returns to be awaited, on one event loop.

    A call that takes too long is given up. An async function is cancelled. The thread of another
    cannot be stopped: it is left alone, and a new one takes its place. That happens as soon as a
    call is slow, so that the time limits of calls that hang run side by side: the first call alone
    is waited for, which may load what later ones use. Threads end when there is nothing to do.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        timeout: float | None,
        num_workers: int = 1,
        admit: Callable[[], None] | None = None,
        most_beside: int = MOST_BESIDE,
    ) -> None:
        """`admit` returns when the next call may begin; with it, a call that is awaited or slow
        counts as one of the `num_workers`, else any number of awaited ones go on at once,
        and `most_beside` of the slow ones."""
        guard_exit()
        self._function = function
        self._timeout = timeout
        self._num_workers = num_workers
        self._admit = admit
        self._waiting: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0  # whose place no other has taken
        self._most_beside = 0 if admit is not None else most_beside
        self._beside = 0  # slow calls under way, whose place another thread has taken
        self._returned, self._seconds = 0, 0.0  # calls that have, and what they took in all
        self._first_has_ended = False

    def submit(self, arguments: Mapping[str, Any], name: str) -> Future[Any]:
        call = _Call(arguments, name)
        self._waiting.put(call)
        self._add_thread()
        return call.future

    def _add_thread(self) -> None:
        with self._lock:
            if self._threads >= self._num_workers or self._waiting.empty():
                return
            self._threads += 1
        threading.Thread(target=self._work, name="scoring", daemon=True).start()

    def _work(self) -> None:
        while (call := self._next()) is not None:
            if not call.future.set_running_or_notify_cancel():
                continue
            if self._admit is not None:
                self._admit()
            call.begun = time.monotonic()
            call.clock = RunTime()
            # A call that has been answered need not be kept until its time is over.
            if self._timeout is not None:
                _after(self._timeout, self._expire, weakref.ref(call))
            if self._most_beside:
                _after(SLOW_SECONDS, self._look, weakref.ref(call))
            returned = attempt(_call_in_thread, self._function, call)
            has_place = self._count(call)
            if not call.leave_thread(returned) or not has_place:
                return  # another thread has taken this one's place
            if self._admit is not None:
                wait([call.future])

    def _next(self) -> _Call | None:
        with self._lock:  # so that nobody counts on a thread that is about to end
            try:
                return self._waiting.get_nowait()
            except queue.Empty:
                self._threads -= 1
                return None

    def _count(self, call: _Call) -> bool:
        """Count a call that has come back; False if another thread has taken its thread's place."""
        with self._lock:
            call.has_returned = self._first_has_ended = True
            self._returned += 1
            self._seconds += time.monotonic() - call.begun
            self._beside -= call.is_beside
            return not call.is_beside

    def _look(self, reference: weakref.ref[_Call]) -> None:
        """Have others go on beside a call that is slow; else look again."""
        call = reference()
        if call is None:
            return
        with self._lock:
            if call.has_returned or call.is_beside:
                return
            slow = max(SLOW_SECONDS, SLOW_TIMES * self._seconds / max(self._returned, 1))
            left = slow - (time.monotonic() - call.begun)
            if not self._first_has_ended or self._beside >= self._most_beside:
                left = max(left, SLOW_SECONDS)
            if left <= 0:
                self._step_aside(call)
        if left > 0:
            _after(left, self._look, reference)
        else:
            self._add_thread()

    def _step_aside(self, call: _Call) -> None:
        if not call.is_beside:
            call.is_beside = True
            self._beside += 1
            self._threads -= 1

    def _expire(self, reference: weakref.ref[_Call]) -> None:
        call = reference()
        assert self._timeout is not None, "only a call with a time limit is watched"
        if call is None:
            return
        assert call.clock is not None, "it has begun"
        left = self._timeout - call.clock.seconds()
        if left > 0:  # it has waited in a queue
            _after(max(left, SLOW_SECONDS), self._expire, reference)
            return
        if not call.expire(self._timeout):
            return
        logger.warning(
            "%s: the score function has not come back after %g s. Its thread cannot be stopped and "
            "is left behind; reward_model.reward_manager=prime scores in processes, which are "
            "ended.",
            call.name,
            self._timeout,
        )
        with self._lock:
            self._first_has_ended = True
            self._step_aside(call)
        self._add_thread()


class _EventLoop:
    """An event loop in a daemon thread.

    One serves the score functions of the whole process: a client that a function keeps between
    calls holds connections that belong to the loop that opened them. Another keeps the time: no
    function of a user's runs on it.
    """

    _loops: ClassVar[dict[str, _EventLoop]] = {}
    _lock = threading.Lock()

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    @classmethod
    def named(cls, name: str) -> _EventLoop:
        with cls._lock:
            if name not in cls._loops:
                cls._loops[name] = cls(name)
            return cls._loops[name]

    def run(self, awaitable: Awaitable[Any]) -> Future[Any]:
        async def result() -> Any:
            try:
                return await awaitable
            except (SystemExit, KeyboardInterrupt) as error:  # they would stop the loop
                raise RewardError(explain(error)) from error

        return asyncio.run_coroutine_threadsafe(result(), self.loop)

    def _run(self) -> None:
        with no_exit():  # here, as calls take turns on the loop
            while not self._is_stopping:
                attempt(self.loop.run_forever)  # a task that a function starts may stop it, too

    def replace_if_blocked(self, name: str) -> None:
        """Start another loop if this one does not respond: an async function blocks it."""
        answers = threading.Event()
        self.loop.call_soon_threadsafe(answers.set)

        def look() -> None:
            if answers.is_set():
                return
            logger.warning(
                "%s: an async score function blocks its event loop, where it should await. The "
                "loop is left behind; calls that wait on it time out.",
                name,
            )
            with _EventLoop._lock:
                if _EventLoop._loops.get(FUNCTIONS) is self:
                    del _EventLoop._loops[FUNCTIONS]

        _after(SECONDS_FOR_A_SIGN, look)

    def _stop(self) -> None:
        self._is_stopping = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SECONDS_FOR_A_SIGN)
        if not self._thread.is_alive():
            self.loop.close()
