"""The copies of a run's checkpoints in `trainer.default_hdfs_dir`, under the names they have here.

The tracker file is written last, so that it never names a checkpoint that is not complete.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from caldera.config import RunKeys
from caldera.errors import ConfigError
from caldera.storage import below_url, is_url, shown_url
from caldera.storage.fetching import fetch
from caldera.storage.store import Store, Transfer, reason_of, retried
from caldera.trainer.checkpoint import (
    ROLES,
    TRACKER,
    expired_roles,
    is_step_folder,
    read_step,
    step_folder,
    step_of,
)
from caldera.trainer.checkpoint_manifest import MANIFEST

logger = logging.getLogger(__name__)


KEY = "trainer.default_hdfs_dir"
PROBE = ".caldera_can_write"
DELAYS = (1.0, 4.0, 16.0)
"""Seconds before each further attempt at what a store refused."""
SECONDS_BETWEEN_LINES = 60.0
"""Uploads run beside the training, whose lines matter more."""

T = TypeVar("T")


class RemoteCheckpoints:
    """What is kept behind the URL. Whatever goes wrong there is an OSError."""

    def __init__(self, config: RunKeys) -> None:
        url = str(config.default_hdfs_dir).rstrip("/")
        if not is_url(url):
            raise ConfigError(f"{KEY}={url!r}: takes a URL, such as s3://bucket/run or file:///run")
        self.url = url
        self.shown = shown_url(url)
        self._config = config
        self._store = Store(url, KEY)
        if self._store.is_read_only:
            raise ConfigError(f"{self._store.told}: can be read, and not be written")
        self._has_looked = False
        self._tracked: int | None = None
        """The step that the tracker names, once `upload` has looked."""
        self._transfer: Transfer | None = None
        self._asked = time.monotonic()
        self._is_closed = False

    @property
    def told(self) -> str:
        """`key='url'`, for messages."""
        return self._store.told

    @property
    def moved(self) -> float:
        """When there was last any progress, as `time.monotonic` tells it."""
        return max(self._asked, self._transfer.moved if self._transfer else self._asked)

    def close(self) -> None:
        """Have an upload that hangs, and may wake up one day, end without a trace."""
        self._is_closed = True

    def check_writable(self) -> None:
        """See that a file can be written."""
        self._store.write_text(PROBE, "yes")
        self._store.remove(PROBE)

    def forget(self) -> None:
        """Remove the tracker, so that nobody goes on from what is there."""
        self._store.remove(TRACKER)

    def newest(self) -> int | None:
        """The newest complete step."""
        return self._again(self._read_tracker, f"reading {TRACKER}", attempts=2)

    def download(self, step: int, cache: Path) -> Path:
        """The checkpoint's copy, somewhere below the cache folder."""
        return fetch(below_url(self.url, step_folder(step)), KEY, cache)

    def upload(self, folder: Path) -> None:
        """Copy a complete checkpoint over, and have the tracker name it if it is the newest."""
        step, name = step_of(folder), folder.name
        self._make_way(step)
        self._again(lambda: self._store.remove(name), f"clearing {name}")
        sizes = {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        self._transfer = transfer = Transfer(
            f"uploading {name} to {self.shown}", sum(sizes.values()), SECONDS_BETWEEN_LINES
        )
        for file in sorted(sizes, key=MANIFEST.__eq__):  # which is last, when all it names is there
            self._put(folder / file, f"{name}/{file}", transfer)
        found = self._again(lambda: self._store.files(name), f"looking at {name}")
        there = {file.name: file.size for file in found}
        if any(there.get(file, -1) not in (size, None) for file, size in sizes.items()):
            raise OSError(f"{name} has other sizes there than here")
        newest = max(step, self._tracked or step)
        if newest != self._tracked:
            self._again(lambda: self._store.write_text(TRACKER, str(step)), f"writing {TRACKER}")
            self._tracked = newest
        transfer.end()
        self._prune_or_tell(newest)

    def _put(self, source: Path, name: str, transfer: Transfer) -> None:
        self._again(lambda: self._store.put(source, name, transfer), f"uploading {name}")

    def _make_way(self, step: int) -> None:
        """Remove a tracker of this step, or of a later one that the run has gone back behind."""
        if self._has_looked:
            return
        text = self._again(lambda: self._store.read_text(TRACKER), f"reading {TRACKER}")
        named = read_step(text.strip()) if text is not None else None
        self._tracked = named if named is not None and named < step else None
        if text is not None and self._tracked is None:
            self._again(self.forget, f"removing {TRACKER}")
        self._has_looked = True

    def _read_tracker(self) -> int | None:
        text = self._store.read_text(TRACKER)
        if text is None:
            return None
        step = read_step(text.strip())
        if step is None:  # as it may be for a moment while it is written
            raise OSError(f"{TRACKER} contains {text[:100]!r}, which is no step")
        return step

    def _prune_or_tell(self, newest: int) -> None:
        """Remove what is beyond the numbers to keep; it can wait for the next time."""
        try:
            self._again(lambda: self._prune(newest), "removing older checkpoints")
        except OSError as error:
            logger.warning(
                "older checkpoints in %s could not be removed: %s", self.shown, reason_of(error)
            )

    def _prune(self, newest: int) -> None:
        steps = [step_of(name) for name in self._store.folders() if is_step_folder(name)]
        expired = expired_roles(steps, newest, self._config)
        for step, role in expired:
            self._store.remove(f"{step_folder(step)}/{role}")
        for step in {step for step, _ in expired}:
            if not any(self._store.exists(f"{step_folder(step)}/{role}") for role in ROLES):
                self._store.remove(step_folder(step))

    def _again(self, work: Callable[[], T], what: str, attempts: int | None = None) -> T:
        """Do it, if need be several times."""
        if self._is_closed:
            raise OSError("the upload was given up")

        def attempt() -> T:
            self._asked = time.monotonic()
            return work()

        delays = DELAYS if attempts is None else DELAYS[: attempts - 1]
        return retried(attempt, delays, f"{self.shown}: {what}")


# ---- Uploads of checkpoints in a thread, so that no failure of a store ends or holds up a run

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
        self._uploading: int | None = None
        self._thread: threading.Thread | None = None

    def add(self, step: int) -> None:
        """Upload this one, and then those that failed before."""
        with self._changed:
            self._pending.add(step)
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
                    self._remote.shown,
                    ", ".join(map(step_folder, sorted(self._pending))),
                )

    def _work(self) -> None:
        try:
            while (step := self._next()) is not None and self._upload(step):
                pass  # after a failure, the others would fail as well: they wait for the next save
        finally:
            with self._changed:
                self._end()

    def _next(self) -> int | None:
        with self._changed:
            self._pending = {s for s in self._pending if (self._root / step_folder(s)).is_dir()}
            self._uploading = max(self._pending, default=None)
            if self._uploading is None:
                self._end()
            return self._uploading

    def _end(self) -> None:
        if self._thread is threading.current_thread():
            self._uploading = self._thread = None
            self._changed.notify_all()

    def _upload(self, step: int) -> bool:
        try:
            self._remote.upload(self._root / step_folder(step))
        except OSError as error:
            with self._changed:
                self.failed += 1
                self._end()  # at once, so that `add` starts another thread
            logger.warning(
                "%s could not be uploaded to %s: %s; the next save tries again (%d failed so far)",
                step_folder(step),
                self._remote.shown,
                reason_of(error),
                self.failed,
            )
            return False
        with self._changed:
            self._pending.discard(step)
        return True
