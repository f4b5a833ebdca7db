"""Checkpoint folders: written aside and renamed, found again, pruned, copied to a store.

All write into `.partial_global_step_N`, which becomes a checkpoint once all have written. Until
then the last one counts.
"""

from __future__ import annotations

import logging
import pickle
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from caldera.config import RunKeys
from caldera.engine.saving import read_file
from caldera.errors import CalderaError, CheckpointError, ConfigError
from caldera.storage import is_fetched, is_url, shown_url
from caldera.storage.locks import NO_SPACE, full_disk
from caldera.storage.writing import flush, write_text_atomic
from caldera.trainer.checkpoint_manifest import DamagedCheckpointError, verify, write_manifest

if TYPE_CHECKING:
    from caldera.single_controller import WorkerGroup
    from caldera.trainer.hub import HubPushes
    from caldera.trainer.remote_checkpoints import CheckpointUploads, RemoteCheckpoints

logger = logging.getLogger(__name__)


# ---- What the checkpoints of a run are called, here and in a remote copy, and which of them are
# kept
#
# {root}/latest_checkpointed_iteration.txt     the newest complete step
# {root}/global_step_{N}/actor, critic, data.pt, trainer_state.json

TRACKER = "latest_checkpointed_iteration.txt"
STARTED_ANEW = "0"
"""What the tracker says of a run that has left earlier checkpoints behind and saved none yet."""
ROLES = ("actor", "critic")
LONGEST_STEP = 18  # digits
_STEP = re.compile(rf"[0-9]{{1,{LONGEST_STEP}}}")
_STEP_FOLDER = re.compile(r"global_step_(\d+)$")


def step_folder(step: int) -> str:
    """What the folder of a step is called."""
    return f"global_step_{step}"


def is_step_folder(name: str) -> bool:
    """Whether a run of this program would call a folder so."""
    return _STEP_FOLDER.match(name) is not None


def tells_step(name: str) -> bool:
    """Whether a name ends as that of a step's folder does."""
    return _STEP_FOLDER.search(name) is not None


def step_of(folder: Path | str) -> int:
    """The step that a checkpoint folder's name tells."""
    match = _STEP_FOLDER.search(str(folder))
    assert match is not None, folder
    return int(match[1])


def read_step(text: str) -> int | None:
    """The step that a tracker names, if that is a number."""
    return int(text) if _STEP.fullmatch(text) else None


def tracked_step(root: Path) -> int | None:
    """The newest complete step of a run's folder, if there is any."""
    tracker = root / TRACKER
    text = tracker.read_text().strip() if tracker.is_file() else ""
    return None if text == STARTED_ANEW else read_step(text)


def complete_steps(root: Path) -> list[int]:
    """The steps of all complete checkpoints of a run's folder, the newest first."""
    return sorted(
        (
            step_of(path)
            for path in (root.iterdir() if root.is_dir() else ())
            if is_step_folder(path.name)
            and (path / "actor").is_dir()
            and (path / "data.pt").is_file()
        ),
        reverse=True,
    )


def expired_roles(steps: Iterable[int], newest: int, config: RunKeys) -> list[tuple[int, str]]:
    """(step, role) of everything beyond the numbers to keep.

    Checkpoints of later steps than the newest belong to a run that this one has gone back behind:
    they count as older.
    """
    by_age = sorted(steps, key=lambda step: (step <= newest, step))
    limits = {role: config.checkpoints_to_keep(role) for role in ROLES}
    return [
        (step, role) for role, keep in limits.items() for step in by_age[: -keep if keep else 0]
    ]


FETCHED = ".fetched"
"""Where checkpoints come to that are downloaded: all nodes of a run see this folder."""

T = TypeVar("T")


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, config: RunKeys) -> None:
        _check_places(config)
        self._config = config
        self.root = Path(config.default_local_dir).expanduser()
        self.writers: list[WorkerGroup] = []
        """Groups whose `save_checkpoint` returns before everything is written."""
        self._in_flight: int | None = None
        """The step of a save that has begun, and is not complete."""
        self._saved: int | None = None
        """The newest step that this process has saved."""
        self._remote: RemoteCheckpoints | None = None
        self._remote_step: int | None = None
        """The newest step that was found there."""
        self._missing_there: int | None = None
        """A step that is here and that an earlier process could not upload."""
        self._uploads: CheckpointUploads | None = None
        if config.default_hdfs_dir is not None:
            from caldera.trainer.remote_checkpoints import CheckpointUploads, RemoteCheckpoints

            self._remote = RemoteCheckpoints(config)
            self._uploads = CheckpointUploads(self._remote, self.root)
        self._pushes: HubPushes | None = None
        if config.push_to_hub is not None:
            from caldera.trainer.hub import HubPushes

            self._pushes = HubPushes(config.push_to_hub, self.root)

    @property
    def has_saved(self) -> bool:
        """Whether this process has written one, so that `auto` would find its own."""
        return self._saved is not None

    def create(self) -> None:
        """Make the run's folder; a run that starts anew forgets what it could go on from."""
        self.root.mkdir(parents=True, exist_ok=True)
        starts_anew = self._config.resume_mode == "disable"
        if starts_anew:
            (self.root / TRACKER).unlink(missing_ok=True)
            if complete_steps(self.root):  # which nobody shall take for this run's
                write_text_atomic(self.root / TRACKER, [STARTED_ANEW])
        if self._pushes is not None:
            self._pushes.begin()
        if self._remote is not None:
            self._try_remote(self._remote.check_writable, "cannot be written")
            if starts_anew:
                self._try_remote(self._remote.forget, f"{TRACKER} cannot be removed")

    # ---- saving

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        written: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `write` on a folder that becomes `global_step_{step}` once it is complete: at once,
        or when the `writers` have written, in a later `poll`, `save` or `finish`.

        `written` is called before the checkpoint is complete: what it does is never lost by a
        kill, after which the run either goes on from this checkpoint or repeats the step.
        """
        self.finish()
        partial = self._emptied_partial(step)
        with _full_disk_told(partial):
            partial.mkdir(parents=True)
            write(partial)
        if self.writers:
            self._in_flight = step
            written()
        else:
            self._complete(step, written)

    def poll(self) -> None:
        """Complete the save in flight if all have written."""
        if self._in_flight is not None and all(
            all(writer.checkpoint_written()) for writer in self.writers
        ):
            self.finish()  # which does not wait any more, but hears of a write that has failed

    def finish(self) -> None:
        """Wait until all have written, and complete the save in flight."""
        step, self._in_flight = self._in_flight, None  # if it fails, it is no checkpoint
        if step is not None:
            for writer in self.writers:
                writer.wait_for_checkpoint()
            self._complete(step)

    def _complete(self, step: int, written: Callable[[], None] = lambda: None) -> None:
        partial = self._partial(step)
        if not (partial / "actor").is_dir():
            raise CheckpointError(
                f"trainer.default_local_dir={str(self.root)!r}: the ranks have written their "
                f"checkpoint of step {step} elsewhere; it must be one folder that all nodes share"
            )
        write_manifest(partial)
        flush(partial)
        written()
        self._publish(step)
        self._saved = step
        if self._pushes is not None:
            self._pushes.add(step, self.root / step_folder(step))
        self._prune(step)
        if self._uploads is not None:
            self._uploads.add(step)

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Complete what can be completed. Somebody who interrupts the run does not wait for it."""
        if error is None:
            self.finish()
        elif isinstance(error, Exception):
            step = self._in_flight
            try:
                self.finish()
            except (CalderaError, OSError, RuntimeError) as other:
                # The failure that ends the run is the one to tell: the workers may be gone with it.
                logger.warning("the checkpoint of step %s was not completed: %s", step, other)
        else:
            return
        self.close()

    def metrics(self) -> dict[str, float]:
        """What a save is to be logged with, beside the time that it took."""
        copies = {"uploads": self._uploads, "pushes": self._pushes}
        return {
            f"checkpoint/failed_{name}": float(copy.failed)
            for name, copy in copies.items()
            if copy is not None
        }

    def close(self) -> None:
        """Wait for what is being uploaded or pushed, unless that stands still."""
        if self._pushes is not None:
            self._pushes.wait()
        if self._uploads is not None:
            self._uploads.wait()
            if self._saved is not None:  # what was spared because it was being uploaded
                self._prune(self._saved)

    # ---- resuming

    def to_resume(self) -> Path | None:
        """The folder to go on from, by `trainer.resume_mode`, without damage to its files."""
        try:
            return self._chosen()
        except DamagedCheckpointError as error:
            earlier = self._intact_before(step_of(error.folder))
            if earlier is None:
                raise CheckpointError(
                    f"{error}; {self.root} holds no earlier one that is intact; "
                    "trainer.resume_mode=disable starts anew"
                ) from error
            if self._config.resume_mode != "auto" or not self._config.resume_fallback:
                raise CheckpointError(
                    f"{error}. The one before it is intact. To go on from it, add to the command: "
                    "trainer.resume_mode=resume_path "
                    f"trainer.resume_from_path={shlex.quote(str(earlier))} "
                    "(trainer.resume_fallback=True does so by itself)"
                ) from error
            logger.warning("%s; trainer.resume_fallback=True: going back to %s", error, earlier)
            self._missing_there = None
            return earlier

    def _intact_before(self, step: int) -> Path | None:
        for earlier in complete_steps(self.root):
            folder = self.root / step_folder(earlier)
            try:
                if earlier < step:
                    return verify(folder)
            except DamagedCheckpointError as error:
                logger.warning("%s", error)
        return None

    def _chosen(self) -> Path | None:
        if self._config.resume_mode == "disable":
            return None
        if self._config.resume_mode == "resume_path":
            return verify(self._given(str(self._config.resume_from_path)))
        if self._remote is None:
            local = self._local_newest(must_exist=True)
            return None if local is None else verify(local)
        there = self._remote_step = self._try_remote(self._remote.newest, "cannot be read")
        local = self._local_newest(must_exist=there is None)
        if there is not None and (local is None or step_of(local) < there):
            return self._downloaded(there, self._remote)
        if local is not None and step_of(local) != there:
            self._missing_there = step_of(local)
        return None if local is None else verify(local)

    def loaded(self, folder: Path) -> None:
        """Say that a checkpoint has been read, and that the run goes on from it.

        One that the store lacks is uploaded from now on; the local copy of one that it has is
        deleted, where the config says so.
        """
        logger.info("goes on from %s", folder)
        if self._remote is not None and self._config.resume_mode == "resume_path":
            # Else `auto` would go back to a later step of the branch that is left here.
            self._try_remote(self._remote.forget, f"{TRACKER} cannot be removed")
        if self._uploads is not None and self._missing_there is not None:
            self._uploads.add(self._missing_there)
        if not self._config.del_local_ckpt_after_load:
            return
        if folder.is_relative_to(self.root / FETCHED):
            shutil.rmtree(self.root / FETCHED)
        elif folder.parent == self.root and step_of(folder) == self._remote_step:
            (self.root / TRACKER).unlink(missing_ok=True)
            shutil.rmtree(folder)

    def _given(self, path: str) -> Path:
        key = "trainer.resume_from_path"
        if is_fetched(path):
            if not tells_step(path.rstrip("/")):
                raise CheckpointError(f"{key}={shown_url(path)!r} is not named global_step_N")
            from caldera.storage.fetching import fetch

            return fetch(path, key, self.root / FETCHED)
        return local_checkpoint(path)

    def _local_newest(self, must_exist: bool) -> Path | None:
        """The folder that the tracker names; one that is not there may be an error."""
        tracker = self.root / TRACKER
        if not tracker.is_file():
            return self._untracked_newest()
        text = tracker.read_text().strip()[:LONGEST_STEP]
        if text == STARTED_ANEW:
            return None
        folder = self.root / f"global_step_{text}"
        replaced = self.root / f".replaced_global_step_{text}"
        if replaced.is_dir() and not folder.exists():  # killed between two renames of `_publish`
            replaced.rename(folder)
        if text.isdigit() and folder.is_dir():
            return folder
        if must_exist:
            raise CheckpointError(
                f"{tracker} contains {text!r}, but there is no folder {folder}; "
                "trainer.resume_mode=disable starts anew"
            )
        return None

    def _untracked_newest(self) -> Path | None:
        """The newest complete checkpoint of a folder that has lost its tracker."""
        steps = complete_steps(self.root)
        if not steps:
            return None
        folder = self.root / step_folder(steps[0])
        logger.warning(
            "%s is missing: going on from the newest complete checkpoint, %s; "
            "trainer.resume_mode=disable starts anew",
            self.root / TRACKER,
            folder,
        )
        write_text_atomic(self.root / TRACKER, [str(steps[0])])
        return folder

    def _downloaded(self, step: int, remote: RemoteCheckpoints) -> Path:
        fetched = remote.download(step, self.root / FETCHED)
        try:
            verify(fetched)
        except DamagedCheckpointError:
            shutil.rmtree(self.root / FETCHED)  # else the next run would take it for a good copy
            raise
        fetched.rename(self._emptied_partial(step))
        flush(self._partial(step))
        self._publish(step)
        shutil.rmtree(self.root / FETCHED)
        logger.info("fetched %s of %s", step_folder(step), remote.shown)
        return self.root / step_folder(step)

    def _try_remote(self, work: Callable[[], T], what: str) -> T | None:
        """A store that fails is an error, unless there is a local checkpoint to go on from."""
        try:
            return work()
        except OSError as error:
            from caldera.storage.store import reason_of

            assert self._remote is not None
            said = f"{self._remote.told}: {what}: {reason_of(error)}"
            if self._local_newest(must_exist=False) is None:
                raise ConfigError(said) from error
            logger.warning("%s; going on from the local checkpoint", said)
            return None

    # ---- folders

    def _partial(self, step: int) -> Path:
        """Where a step is written before it is complete."""
        return self.root / f".partial_global_step_{step}"

    def _emptied_partial(self, step: int) -> Path:
        """The same; of a killed process nothing is left."""
        partial = self._partial(step)
        shutil.rmtree(partial, ignore_errors=True)
        return partial

    def _publish(self, step: int) -> None:
        partial, final = self._partial(step), self.root / step_folder(step)
        replaced = self.root / f".replaced_global_step_{step}"
        if final.exists():  # a resumed run reaches the same step again
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        partial.rename(final)
        write_text_atomic(self.root / TRACKER, [str(step)])
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self, newest: int) -> None:
        """Remove roles of checkpoints beyond the number to keep, then empty checkpoints."""
        with self._uploads.holding() if self._uploads else nullcontext() as uploading:
            steps = [step_of(path) for path in self.root.iterdir() if is_step_folder(path.name)]
            idle = [step for step in steps if step != uploading]
            for step, role in expired_roles(steps, newest, self._config):
                if step in idle:
                    shutil.rmtree(self.root / step_folder(step) / role, ignore_errors=True)
            for folder in (self.root / step_folder(step) for step in idle if step != newest):
                if not any((folder / role).exists() for role in ROLES):
                    shutil.rmtree(folder)


def local_checkpoint(path: str) -> Path:
    """The folder that `trainer.resume_from_path` names on this machine."""
    folder = Path(path.removeprefix("file://")).expanduser()
    if not folder.is_dir() or not tells_step(folder.name):
        raise CheckpointError(
            f"trainer.resume_from_path={str(folder)!r} is not an existing folder named "
            "global_step_N"
        )
    return folder


def read_part(path: Path, read: Callable[[Path], T]) -> T:
    """What `read` makes of one file of a checkpoint."""
    try:
        return read(path)
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path} cannot be read, the checkpoint is incomplete or damaged: {error}"
        ) from error


def read_position(folder: Path) -> Any:
    """Where in the data a checkpoint was written."""
    return read_file(folder / "data.pt")


def _check_places(config: RunKeys) -> None:
    if is_url(config.default_local_dir):
        raise ConfigError(
            f"trainer.default_local_dir={shown_url(config.default_local_dir)!r}: takes a local "
            "folder; trainer.default_hdfs_dir is the URL that checkpoints are copied to"
        )
    root = Path(config.default_local_dir).expanduser().resolve()
    there = config.default_hdfs_dir or ""
    if there.startswith("file://") and Path(there.removeprefix("file://")).resolve() == root:
        raise ConfigError(
            f"trainer.default_hdfs_dir={there!r}: is trainer.default_local_dir itself; takes "
            "another folder"
        )
    given = config.resume_from_path if config.resume_mode == "resume_path" else None
    has_copy = config.default_hdfs_dir is not None or is_fetched(given or "")
    if config.del_local_ckpt_after_load and not has_copy:
        raise ConfigError(
            "trainer.del_local_ckpt_after_load=True needs trainer.default_hdfs_dir or a URL as "
            "trainer.resume_from_path: without a copy there the only checkpoint would be deleted"
        )


@contextmanager
def _full_disk_told(partial: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each library that writes has its own
        told = full_disk(error, partial.parent)
        if told is None or NO_SPACE in str(error):
            raise
        if isinstance(error, CalderaError):  # it tells which rank it was
            error.add_note(told)
            raise
        raise CheckpointError(f"{partial} could not be written: {told}") from error
