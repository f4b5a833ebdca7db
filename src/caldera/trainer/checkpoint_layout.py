"""What the checkpoints of a run are called, here and in a remote copy, and which of them are kept.

{root}/latest_checkpointed_iteration.txt     the newest complete step
{root}/global_step_{N}/actor, critic, data.pt, trainer_state.json
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from caldera.config import TrainerConfig

TRACKER = "latest_checkpointed_iteration.txt"
STARTED_ANEW = "0"
"""What the tracker says of a run that has left earlier checkpoints behind and saved none yet."""
ROLES = ("actor", "critic")
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


def tracked_step(root: Path) -> int | None:
    """The newest complete step of a run's folder, if there is any."""
    tracker = root / TRACKER
    text = tracker.read_text().strip() if tracker.is_file() else ""
    return int(text) if text.isdigit() and text != STARTED_ANEW else None


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


def expired_roles(
    steps: Iterable[int], newest: int, config: TrainerConfig
) -> list[tuple[int, str]]:
    """(step, role) of everything beyond the numbers to keep.

    Checkpoints of later steps than the newest belong to a run that this one has gone back behind:
    they count as older.
    """
    by_age = sorted(steps, key=lambda step: (step <= newest, step))
    limits = (config.max_actor_ckpt_to_keep, config.max_critic_ckpt_to_keep)
    return [
        (step, role)
        for role, keep in zip(ROLES, limits, strict=True)
        for step in by_age[: -keep if keep else 0]
    ]
