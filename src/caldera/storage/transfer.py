"""How far a transfer is, and trying again what a store may have dropped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fsspec.callbacks import Callback

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Transfer:
    """Counts the bytes that have gone over, and writes a line now and then."""

    def __init__(self, title: str, total: int, seconds_between_lines: float = 10.0) -> None:
        self._title = title
        self._total = total
        self._interval = seconds_between_lines
        self._done = 0
        self._lock = threading.Lock()
        self._is_stopped = False
        self._started = self._last_line = self.moved = time.monotonic()

    def add(self, count: int) -> None:
        """So many bytes more."""
        with self._lock:
            if self._is_stopped:
                raise OSError("the transfer was stopped")
            self._done += count
            self.moved = time.monotonic()
            if count and self.moved - self._last_line >= self._interval:
                self._last_line = self.moved
                logger.info("%s", self.line())

    def stop(self) -> None:
        """Callers that go on transferring get an error."""
        self._is_stopped = True

    def end(self) -> None:
        """Tell how it went, if it took long enough to have been waited for."""
        if self._last_line != self._started:
            took = _clock(time.monotonic() - self._started)
            logger.info("%s: %s in %s", self._title, _bytes(self._done), took)

    def line(self) -> str:
        """`fetching s3://b/model: 2.5 of 10.0 GB, ETA 0:03:00`; 0 bytes in all means unknown."""
        if self._done <= 0 or self._total <= 0:
            return f"{self._title}: {_bytes(self._done)}"
        seconds = (self.moved - self._started) * (self._total - self._done) / self._done
        done, total = _bytes(self._done), _bytes(self._total)
        return f"{self._title}: {done} of {total}, ETA {_clock(seconds)}"


class CountedFile(Callback):  # type: ignore[misc]  # fsspec has no types
    """The counter of the bytes of one file, for stores."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__()
        self._transfer = transfer
        self._told = 0

    def call(self, *args: Any, **kwargs: Any) -> None:
        self.tell(self.value)

    def tell(self, done: int) -> None:
        """So many bytes of the file are over; fewer than before when it starts again."""
        more, self._told = done - self._told, done
        self._transfer.add(more)


def retried(work: Callable[[], T], delays: Sequence[float], what: str) -> T:
    """Do the work; where it fails, do it again after each of these delays, in seconds."""
    for delay in delays:
        try:
            return work()
        except (FileNotFoundError, PermissionError):  # which a second time would not change
            raise
        except OSError as error:
            logger.info("%s failed, next attempt in %g s: %s", what, delay, reason_of(error))
            time.sleep(delay)
    return work()


def reason_of(error: BaseException) -> str:
    """An error's first line: those of stores may have a hundred."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _bytes(count: int) -> str:
    size, units = float(count), iter(("B", "KB", "MB", "GB"))
    unit = next(units)
    while size >= 1000 and (larger := next(units, None)):
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
