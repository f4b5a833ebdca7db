"""Who gets the next free slot: whoever has waited longest and still wants it."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from caldera.errors import RewardError

__all__ = ["NOBODY_WAITS", "SECONDS_BETWEEN_LOOKS", "Abandoned", "IsAbandoned", "Turns"]

T = TypeVar("T")
IsAbandoned = Callable[[], bool]
"""Whether nobody waits for the outcome any more. Asked again and again while a program waits for
its turn and while it runs; it may take its time."""

SECONDS_BETWEEN_LOOKS = 0.2
NOBODY_WAITS = "nobody waits for the program's outcome any more"


class Abandoned(RewardError):
    """The program was not run, or not to its end."""


class Turns(Generic[T]):
    """Things that one thread at a time may use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: deque[T] = deque()
        self._waiting: deque[queue.SimpleQueue[T]] = deque()

    def take(self, is_abandoned: IsAbandoned | None = None) -> T:
        """Wait for one. Raises Abandoned, and leaves the queue, where nobody wants it any more."""
        with self._lock:
            if self._free:
                return self._free.popleft()
            mine: queue.SimpleQueue[T] = queue.SimpleQueue()
            self._waiting.append(mine)
        try:
            return _wait(mine, is_abandoned)
        except BaseException:  # Ctrl-C as well: nothing may be handed to one who has left
            self._leave(mine)
            raise

    def give(self, thing: T) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().put(thing)
            else:
                self._free.append(thing)

    def _leave(self, mine: queue.SimpleQueue[T]) -> None:
        with self._lock:
            if mine in self._waiting:
                self._waiting.remove(mine)
                return
        with suppress(queue.Empty):
            self.give(mine.get_nowait())  # it was handed one in the meantime

    @property
    def waiting(self) -> int:
        return len(self._waiting)


def _wait(mine: queue.SimpleQueue[T], is_abandoned: IsAbandoned | None) -> T:
    while is_abandoned is None or not is_abandoned():
        with suppress(queue.Empty):
            return mine.get(timeout=None if is_abandoned is None else SECONDS_BETWEEN_LOOKS)
    raise Abandoned(NOBODY_WAITS)
