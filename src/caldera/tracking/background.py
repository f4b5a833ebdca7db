"""Back ends that may fail: what they lose is counted and told once, and the run goes on."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar

from caldera.tracking.loggers import Generation, Logger

logger = logging.getLogger(__name__)

MOST_WAITING = 1000
"""Rows that may wait for a back end, or one task of more; those beyond are lost."""
FINISH_S = 60.0
"""How long a back end may take, when the run is over, for what it still has to send."""

Task: TypeAlias = Callable[[Logger], None]


class Finishable(Protocol):
    """Has something to do when the run is over."""

    def finish(self) -> None: ...


Backend = TypeVar("Backend", bound=Finishable)


class Losses:
    """The losses of one back end; its first failure is logged."""

    def __init__(self, name: str, key: str = "trainer.logger", unit: str = "rows") -> None:
        """`key` is the one that chose the back end, `unit` what is counted."""
        self._name = name
        self._key = key
        self.unit = unit
        self._lock = threading.Lock()
        self.count = 0

    def add(self, reason: str, count: int = 1) -> None:
        with self._lock:
            is_first = self.count == 0
            self.count += count
        if is_first:
            logger.warning(
                "%s: %s has failed, and the run goes on without what it loses: %s",
                self._key,
                self._name,
                reason,
            )

    def tell(self) -> None:
        """The sum, when the run is over."""
        if self.count:
            logger.warning("%s: %s has lost %d %s", self._key, self._name, self.count, self.unit)

    def attempt(self, work: Callable[[], None]) -> bool:
        """Do it; whether it went well. What goes wrong in a library is nothing to end a run for."""
        try:
            work()
        except SystemExit as error:  # some libraries give up so
            if threading.current_thread() is threading.main_thread():
                raise  # of a signal, which ends the run
            self.add(f"{type(error).__name__}: {error}")
            return False
        except Exception as error:  # noqa: BLE001 -- it is counted and told
            self.add(f"{type(error).__name__}: {error}")
            return False
        return True


class PromptLogger:
    """A back end in the caller's thread."""

    def __init__(self, name: str, make: Callable[[], Logger]) -> None:
        self.losses = Losses(name)
        self._logger: Logger | None = None
        try:
            self._logger = make()  # a mistake of the user's is raised before any work
        except OSError as error:
            self.losses.add(f"{type(error).__name__}: {error}")

    def log(self, data: dict[str, float], step: int) -> None:
        self._give(lambda backend: backend.log(data, step))

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        self._give(lambda backend: backend.log_generations(samples, step))

    def finish(self) -> None:
        backend, self._logger = self._logger, None
        if backend is not None:
            self.losses.attempt(backend.finish)
        self.losses.tell()

    def _give(self, task: Task) -> None:
        backend = self._logger
        if backend is None:
            self.losses.add("it is not open")
        else:
            self.losses.attempt(partial(task, backend))


class Background(Generic[Backend]):
    """A back end in a separate thread, which may wait for a server as long as it likes."""

    def __init__(self, losses: Losses, name: str, make: Callable[[], Backend]) -> None:
        self.losses = losses
        # Bounded by what its tasks count, not by their number; the end is always taken.
        self._tasks: queue.SimpleQueue[tuple[Callable[[Backend], None] | None, int]] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._waiting = 0
        self._in_hand = 0
        self._is_finished = False
        # A daemon, so that one that hangs does not keep the process.
        self._thread = threading.Thread(target=self._work, args=(make,), name=name, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for what is still to be sent, but not for ever."""
        if self._is_finished:
            return
        self._is_finished = True
        self._tasks.put((None, 0))
        self._thread.join(FINISH_S)
        with self._lock:
            unsent = self._waiting + self._in_hand
        if self._thread.is_alive():
            self.losses.add(f"it has not ended within {FINISH_S:g} s", max(unsent, 1))
        elif unsent:
            self.losses.add("its thread has died", unsent)
        self.losses.tell()

    def give(self, task: Callable[[Backend], None], count: int = 1) -> None:
        """Have the thread do it; `count` is how much is lost if it cannot."""
        with self._lock:
            is_taken = self._waiting == 0 or self._waiting + count <= MOST_WAITING
            if is_taken:
                self._waiting += count
        if is_taken:
            self._tasks.put((task, count))
        else:
            self.losses.add(f"{MOST_WAITING} {self.losses.unit} wait already", count)

    def _work(self, make: Callable[[], Backend]) -> None:
        opened: list[Backend] = []
        self.losses.attempt(lambda: opened.append(make()))
        while True:
            task, count = self._tasks.get()
            if task is None:
                break
            with self._lock:
                self._waiting -= count
                self._in_hand = count
            if not opened:
                self.losses.add("it could not be opened", count)
            else:
                self.losses.attempt(partial(task, opened[0]))
            self._in_hand = 0
        if opened:
            self.losses.attempt(opened[0].finish)


class BackgroundLogger(Background[Logger]):
    """A logger in a separate thread."""

    def __init__(self, name: str, make: Callable[[], Logger]) -> None:
        super().__init__(Losses(name), f"logger-{name}", make)

    def log(self, data: dict[str, float], step: int) -> None:
        self.give(lambda backend: backend.log(data, step))

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        self.give(lambda backend: backend.log_generations(samples, step))
