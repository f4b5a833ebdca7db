"""When a checkpoint becomes complete: at once, or once all have written it in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from caldera.config import PPOTrainerConfig
from caldera.errors import CalderaError
from caldera.trainer.checkpoint import CheckpointFolder
from caldera.trainer.ppo.dealing import DealtGroup

logger = logging.getLogger(__name__)


def background_writers(
    config: PPOTrainerConfig, actor: DealtGroup, critic: DealtGroup | None
) -> list[DealtGroup]:
    """The groups that go on writing a checkpoint while the next step runs."""
    writers = [actor] if config.actor_rollout_ref.actor.checkpoint.async_save else []
    if critic is not None and config.critic.checkpoint.async_save:
        writers.append(critic)
    return writers


class CheckpointSaves:
    """The saves of a run, at most one of them in flight.

    `writers` are groups whose `save_checkpoint` returns before everything is written. Their
    `checkpoint_written()` says of each rank whether it has written, and `wait_for_checkpoint()`
    returns when all have. Without such groups a save is complete when it returns.
    """

    def __init__(self, checkpoints: CheckpointFolder, writers: Sequence[DealtGroup]) -> None:
        self._checkpoints = checkpoints
        self._writers = writers

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """Save, once the save before is complete."""
        if not self._writers:
            self._checkpoints.save(step, write)
            return
        self.finish()
        self._checkpoints.begin(step, write)

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
