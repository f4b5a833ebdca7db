"""What each rank writes for itself beside the weights: its random generators, the schedule."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from caldera.engine.checkpoints.safe_loading import load_file
from caldera.engine.checkpoints.storage import DAMAGE
from caldera.errors import CheckpointError

logger = logging.getLogger(__name__)


def extra_file(folder: Path, rank: int, ranks: int) -> Path:
    """Where a rank writes its extra state."""
    return folder / f"extra_state_world_size_{ranks}_rank_{rank}.pt"


def read_extra(folder: Path, rank: int, ranks: int) -> Any:
    """A rank's extra state; rank 0's where another number of ranks wrote the checkpoint."""
    own = extra_file(folder, rank, ranks)
    others = sorted(folder.glob("extra_state_world_size_*_rank_0.pt"))
    if not others or extra_file(folder, 0, ranks) in others:
        return read_file(own)
    logger.warning(
        "%s was written by another number of ranks than the %d there are now: random generators "
        "go on from the state of rank 0 in %s", folder, ranks, others[0].name,
    )  # fmt: skip
    return read_file(others[0])


def read_file(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete")
    try:
        return load_file(path, path)
    except DAMAGE as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def write_file(state: Any, path: Path) -> None:
    """Write aside, then rename, so that a file is complete if it is there."""
    unfinished = path.with_name(f".{path.name}.tmp")
    torch.save(state, unfinished)
    unfinished.replace(path)


def rng_state() -> dict[str, Any]:
    """The state of every global random generator."""
    state = {
        "cpu": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    np.random.set_state(state["numpy"])
    random.setstate(state["random"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
