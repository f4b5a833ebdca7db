"""When a checkpoint becomes complete: at once, or once all have written it in the background."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from caldera.errors import CalderaError
from caldera.single_controller import WorkerGroup
from caldera.tracking import Tracking
from caldera.trainer.checkpoint import CheckpointFolder

logger = logging.getLogger(__name__)


def saving_time_logger(
    tracking: Tracking, checkpoints: CheckpointFolder, step: int
) -> Callable[[], None]:
    """Logs the seconds from now until it is called, as the time that the step's save took."""
    started = time.perf_counter()

    def log() -> None:
        seconds = time.perf_counter() - started
        tracking.log({"timing_s/save_checkpoint": seconds} | checkpoints.metrics(), step)

    return log


class CheckpointSaves:
    """The saves of a run, at most one of them in flight.

    `writers` are groups whose `save_checkpoint` returns before everything is written. Their
    `checkpoint_written()` says of each rank whether it has written, and `wait_for_checkpoint()`
    returns when all have. Without such groups a save is complete when it returns.
    """

    def __init__(self, checkpoints: CheckpointFolder, writers: Sequence[WorkerGroup]) -> None:
        self._checkpoints = checkpoints
        self._writers = writers

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        written: Callable[[], None] = lambda: None,
    ) -> None:
        """Save, once the save before is complete.

        `written` is called before the checkpoint is complete: what it does is never lost by a
        kill, after which the run either goes on from this checkpoint or repeats the step.
        """
        if not self._writers:
            self._checkpoints.save(step, write, written)
            return
        self.finish()
        self._checkpoints.begin(step, write)
        written()

    def poll(self) -> None:
        """Complete the save in flight if all have written."""
        if self._checkpoints.in_flight is None:
            return
        if all(all(writer.checkpoint_written()) for writer in self._writers):
            self.finish()  # which does not wait any more, but hears of a write that has failed

    def finish(self) -> None:
        """Wait until all have written, and complete the save in flight."""
        if self._checkpoints.in_flight is not None:
            try:
                for writer in self._writers:
                    writer.wait_for_checkpoint()
            except BaseException:  # whatever it was, what was written is no checkpoint
                self._checkpoints.abandon()
                raise
            self._checkpoints.complete()

    def __enter__(self) -> CheckpointSaves:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Complete what can be completed. Somebody who interrupts the run does not wait for it."""
        if error is None:
            self.finish()
        elif isinstance(error, Exception):
            self._try_to_finish()
        else:
            return
        self._checkpoints.close()

    def _try_to_finish(self) -> None:
        """The failure that ends the run is the one to tell: the workers may be gone with it."""
        step = self._checkpoints.in_flight
        try:
            self.finish()
        except (CalderaError, OSError, RuntimeError) as error:
            logger.warning("the checkpoint of step %s was not completed: %s", step, error)
