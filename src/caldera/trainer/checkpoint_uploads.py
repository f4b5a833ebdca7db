"""Uploads of checkpoints in a thread, so that no failure of a store ends or holds up a run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from caldera.storage.transfer import reason_of
from caldera.trainer.checkpoint_layout import step_folder
from caldera.trainer.remote_checkpoints import RemoteCheckpoints

logger = logging.getLogger(__name__)

STALL_S = 1800.0
"""How long an upload may stand still before nobody waits for it any more. Long, because some stores
tell of a file only when all of it is over."""


class CheckpointUploads:
    """Copies the checkpoints of `root` over, one at a time, the newest first.

    What fails is tried again at the next save, as long as it is still here.
    """

    def __init__(self, remote: RemoteCheckpoints, root: Path) -> None:
        self.failed = 0
        """Uploads that were given up so far."""
        self._remote = remote
        self._root = root
        self._changed = threading.Condition()  # guards what follows
        self._pending: set[int] = set()
        self._put_off: set[int] = set()
        """Those of the pending ones that wait for the next save."""
        self._uploading: int | None = None
        self._thread: threading.Thread | None = None

    def add(self, step: int) -> None:
        """Upload this one, and then those that failed before."""
        with self._changed:
            self._pending.add(step)
            self._put_off.clear()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="checkpoint-upload", daemon=True
                )
                self._thread.start()

    @contextmanager
    def holding(self) -> Iterator[int | None]:
        """The step that is being uploaded, if any; no other upload starts meanwhile."""
        with self._changed:
            yield self._uploading

    def wait(self) -> None:
        """Wait for the uploads, unless one stands still for too long."""
        with self._changed:
            if self._thread is not None:
                logger.info("waiting for the upload of checkpoints to %s", self._remote.shown)
            while self._thread is not None:
                self._changed.wait(timeout=1.0)
                if time.monotonic() - self._remote.moved > STALL_S:
                    self._remote.close()
                    self.failed += 1
                    break
            if self._pending:
                logger.warning(
                    "not uploaded to %s: %s; starting the run again uploads the newest one",
                    self._remote.shown, ", ".join(map(step_folder, sorted(self._pending))),
                )  # fmt: skip

    def _work(self) -> None:
        try:
            while (step := self._next()) is not None:
                self._upload(step)
        finally:
            with self._changed:
                self._end()

    def _next(self) -> int | None:
        with self._changed:
            self._pending = {s for s in self._pending if (self._root / step_folder(s)).is_dir()}
            self._uploading = max(self._pending - self._put_off, default=None)
            if self._uploading is None:
                self._end()  # at once, so that `add` starts another thread
            return self._uploading

    def _end(self) -> None:
        if self._thread is threading.current_thread():
            self._uploading = self._thread = None
            self._changed.notify_all()

    def _upload(self, step: int) -> None:
        try:
            self._remote.upload(self._root / step_folder(step))
        except OSError as error:
            with self._changed:
                self._put_off |= self._pending  # the others would fail as well
                self.failed += 1
            logger.warning(
                "%s could not be uploaded to %s: %s; the next save tries again (%d failed so far)",
                step_folder(step), self._remote.shown, reason_of(error), self.failed,
            )  # fmt: skip
            return
        with self._changed:
            self._pending.discard(step)
