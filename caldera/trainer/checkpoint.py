"""Checkpoint folders: written aside and renamed, found again, pruned.

{root}/latest_checkpointed_iteration.txt     the newest complete step
{root}/global_step_{N}/actor, critic, data.pt, trainer_state.json
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from caldera.config import TrainerConfig
from caldera.errors import CheckpointError, ConfigError
from caldera.tracking.dumps import write_text_atomic

TRACKER = "latest_checkpointed_iteration.txt"
_STEP_FOLDER = re.compile(r"global_step_(\d+)$")

T = TypeVar("T")


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self.root = Path(config.default_local_dir).expanduser()
        self.has_saved = False
        """Whether this process has written one, so that `auto` would find its own."""

    def create(self) -> None:
        """Make the run's folder; a run that starts anew forgets what it could go on from."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"trainer.default_local_dir={str(self.root)!r}: no such folder can be made: {error}"
            ) from error
        if self._config.resume_mode == "disable":
            (self.root / TRACKER).unlink(missing_ok=True)

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """Call `write` on a folder that becomes `global_step_{step}` once it is complete."""
        partial = self.root / f".partial_global_step_{step}"
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed while writing
        partial.mkdir(parents=True)
        write(partial)
        _flush(partial)
        final = self.root / f"global_step_{step}"
        if final.exists():  # a resumed run reaches the same step again
            replaced = self.root / f".replaced_global_step_{step}"
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        partial.rename(final)
        write_text_atomic(self.root / TRACKER, [str(step)])
        self.has_saved = True
        shutil.rmtree(self.root / f".replaced_global_step_{step}", ignore_errors=True)
        self._prune(step)

    def to_resume(self) -> Path | None:
        """The folder to go on from, by `trainer.resume_mode`."""
        if self._config.resume_mode == "disable":
            return None
        if self._config.resume_mode == "resume_path":
            return self._given(Path(str(self._config.resume_from_path)).expanduser())
        tracker = self.root / TRACKER
        if not tracker.is_file():
            return None
        text = tracker.read_text().strip()
        folder = self.root / f"global_step_{text}"
        replaced = self.root / f".replaced_global_step_{text}"
        if replaced.is_dir() and not folder.exists():  # killed between the two renames of `save`
            replaced.rename(folder)
        if not text.isdigit() or not folder.is_dir():
            raise CheckpointError(
                f"{tracker} says {text!r}, but there is no folder {folder}; "
                "trainer.resume_mode=disable starts anew"
            )
        return folder

    def _given(self, folder: Path) -> Path:
        if not folder.is_dir() or not _STEP_FOLDER.search(folder.name):
            raise CheckpointError(
                f"trainer.resume_from_path={str(folder)!r} is not an existing folder "
                "named global_step_N"
            )
        return folder

    def _prune(self, newest: int) -> None:
        """Remove roles of checkpoints beyond the number to keep, then empty checkpoints.

        Checkpoints of later steps belong to a run that this one has gone back behind: they count
        as older than the one just saved.
        """
        folders = [path for path in self.root.iterdir() if _STEP_FOLDER.match(path.name)]
        folders.sort(key=lambda path: (step_of(path) <= newest, step_of(path)))
        for role, keep in (
            ("actor", self._config.max_actor_ckpt_to_keep),
            ("critic", self._config.max_critic_ckpt_to_keep),
        ):
            for path in folders[: -keep if keep else 0]:
                shutil.rmtree(path / role, ignore_errors=True)
        for path in folders:
            if not (path / "actor").exists() and not (path / "critic").exists():
                shutil.rmtree(path)


def step_of(folder: Path) -> int:
    """The step that a checkpoint folder's name tells."""
    match = _STEP_FOLDER.search(folder.name)
    assert match is not None, folder
    return int(match[1])


def read_part(path: Path, read: Callable[[Path], T]) -> T:
    """What `read` makes of one file of a checkpoint."""
    try:
        return read(path)
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path} cannot be read, the checkpoint is incomplete or damaged: {error}"
        ) from error


def _flush(folder: Path) -> None:
    """Have the files on disk before the rename that declares them complete."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
