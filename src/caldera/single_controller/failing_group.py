"""What worker groups in other processes have in common: they wait for answers, and when a rank
fails they look for the cause, end the group and raise one screen."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from caldera.errors import WorkerError
from caldera.single_controller.failure import (
    RankFailure,
    WaitingRank,
    patience,
    silence_failure,
    worker_error,
)
from caldera.single_controller.worker_group import Pending, WorkerGroup


@dataclass(eq=False)
class OwedAnswer(Pending):
    """An answer that a rank owes."""

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
        """Wait for any rank without a failure, and note answers and failures; whether there was
        anything."""

    @abstractmethod
    def _collect(
        self, failures: Mapping[int, RankFailure], silent_s: float
    ) -> tuple[list[RankFailure], list[WaitingRank]]:
        """What there is to say of ranks that have failed, and of those still in a call."""

    @abstractmethod
    def _end(self, how: str) -> None:
        """End the group, with what it is to say from now on."""

    def _is_done(self, answer: Any) -> bool:
        return bool(answer.is_done)

    def _check_usable(self) -> None:
        if self._ended is not None:
            raise WorkerError(f"worker group {self.name} {self._ended}")

    def _wait_for(self, pending: Collection[Any], timeout_s: float) -> None:
        """Take answers until these have come."""
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
