"""Calls of score functions, one a sample: many at once, none of them for ever.

A `Scoring` takes one call at a time and answers with a future. Whoever has a whole batch submits
all of its samples and waits; whoever has a sampler submits each sample when it is there.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import logging
import queue
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from caldera.errors import RewardError
from caldera.reward.explaining import explain

__all__ = ["CallTimeout", "Scoring", "ScoringLimits", "ThreadScoring", "attempt"]

logger = logging.getLogger(__name__)

SECONDS_FOR_A_SIGN = 1.0  # in which an event loop that is not blocked does what it is asked to


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
    except BaseException as error:  # noqa: BLE001 -- the future tells of it
        future.set_exception(error)
    return future


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

    def settle(self, done: Future[Any]) -> None:
        """Answer with what has come."""
        with suppress(InvalidStateError):  # it was too late
            if done.cancelled():
                self.future.set_exception(asyncio.CancelledError())
            elif error := done.exception():
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
            if returned.exception() is None and inspect.isawaitable(returned.result()):
                self._awaiting.add(self)
                self._awaited = _EventLoop.current().run(returned.result())
        if self._awaited is None:
            self.settle(returned)
        else:
            self._awaited.add_done_callback(self.settle)
        return True

    def expire(self, seconds: float) -> bool:
        """Answer that it took too long; True if a thread is still at it."""
        with self._lock:
            if self.future.done():
                return False
            self._is_too_late = not self._has_left_its_thread
            with suppress(InvalidStateError):
                self.future.set_exception(CallTimeout(seconds))
            if self._awaited is not None:
                self._awaiting.discard(self)
                self._awaited.cancel()
                _EventLoop.current().replace_if_blocked(self.name)
            return self._is_too_late


class ThreadScoring:
    """Runs a function in daemon threads; what it returns to be awaited, on one event loop.

    A call that takes too long is given up. An async function is cancelled. The thread of another
    cannot be stopped: it is left alone, and a new one takes its place. Threads end when there is
    nothing to do.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        timeout: float | None,
        num_workers: int = 1,
        admit: Callable[[], None] | None = None,
    ) -> None:
        """`admit` returns when the next call may begin; with it, a call that is awaited counts as
        one of the `num_workers`, else any number of them go on at once."""
        self._function = function
        self._timeout = timeout
        self._num_workers = num_workers
        self._admit = admit
        self._waiting: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0  # that are not abandoned

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
            if self._timeout is not None:
                # A call that has been answered need not be kept until its time is over.
                _watch().call_later(self._timeout, self._expire, weakref.ref(call))
            if not call.leave_thread(attempt(self._function, **call.arguments)):
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

    def _expire(self, reference: weakref.ref[_Call]) -> None:
        call = reference()
        assert self._timeout is not None, "only a call with a time limit is watched"
        if call is None or not call.expire(self._timeout):
            return
        logger.warning(
            "%s: the score function has not come back after %g s. Its thread cannot be stopped and "
            "is left behind; reward_model.reward_manager=prime scores in processes, which are "
            "ended.", call.name, self._timeout,
        )  # fmt: skip
        with self._lock:
            self._threads -= 1
        self._add_thread()


class _EventLoop:
    """An event loop in a daemon thread.

    One serves the score functions of the whole process: a client that a function keeps between
    calls holds connections that belong to the loop that opened them.
    """

    _of_functions: _EventLoop | None = None
    _lock = threading.Lock()

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    @classmethod
    def current(cls) -> _EventLoop:
        """The one of the score functions."""
        with cls._lock:
            if cls._of_functions is None:
                cls._of_functions = cls("score functions")
            return cls._of_functions

    def run(self, awaitable: Awaitable[Any]) -> Future[Any]:
        async def result() -> Any:
            try:
                return await awaitable
            except (SystemExit, KeyboardInterrupt) as error:  # they would stop the loop
                raise RewardError(explain(error)) from error

        return asyncio.run_coroutine_threadsafe(result(), self._loop)

    def _run(self) -> None:
        while not self._is_stopping:
            attempt(self._loop.run_forever)  # a task that a function starts may stop it, too

    def call_later(self, seconds: float, function: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, function, *args)

    def replace_if_blocked(self, name: str) -> None:
        """Start another loop if this one does not answer: an async function blocks it."""
        answers = threading.Event()
        self._loop.call_soon_threadsafe(answers.set)

        def look() -> None:
            if answers.is_set():
                return
            logger.warning(
                "%s: an async score function blocks its event loop, where it should await. The "
                "loop is left behind; calls that wait on it time out.", name,
            )  # fmt: skip
            with _EventLoop._lock:
                if _EventLoop._of_functions is self:
                    _EventLoop._of_functions = None

        _watch().call_later(SECONDS_FOR_A_SIGN, look)

    def _stop(self) -> None:
        self._is_stopping = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS_FOR_A_SIGN)
        if not self._thread.is_alive():
            self._loop.close()


_watch_lock = threading.Lock()


def _watch() -> _EventLoop:
    """The loop that keeps the time. No function of a user's runs on it."""
    with _watch_lock:
        return _the_watch()


@functools.cache
def _the_watch() -> _EventLoop:
    return _EventLoop("time limits of score functions")
