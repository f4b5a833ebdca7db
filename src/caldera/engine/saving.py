"""Checkpoints of one engine: what is written where, by which rank, and when it is complete."""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from caldera.config import CheckpointConfig
from caldera.engine.checkpoints import PendingSave, load, save_distributed
from caldera.engine.checkpoints.classic import save_classic
from caldera.engine.checkpoints.safe_loading import load_file
from caldera.engine.checkpoints.storage import DAMAGE
from caldera.errors import CheckpointError
from caldera.models.loading import save_pretrained

logger = logging.getLogger(__name__)


# ---- What each rank writes for itself beside the weights: its random generators, the schedule


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
        "go on from the state of rank 0 in %s",
        folder,
        ranks,
        others[0].name,
    )
    return read_file(others[0])


def read_file(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete")
    try:
        return load_file(path, path)
    except CheckpointError:  # it would run code
        raise
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


class RoleCheckpoint(ABC):
    """Weights and optimiser, as an engine has them, and each rank's own state beside them."""

    def __init__(self, module: nn.Module, config: CheckpointConfig) -> None:
        """`module` is the Hugging Face model, which may be without values."""
        self._module = module
        self._config = config
        self._pending: PendingSave | None = None
        spread = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if spread else 0
        self._size = dist.get_world_size() if spread else 1

    @property
    def is_asynchronous(self) -> bool:
        """Whether `save` returns before everything is on disk."""
        return self._config.async_save

    def save(
        self, folder: Path, contents: list[str], schedule: dict[str, Any] | None, version: int
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if "extra" in contents:
            extra = {"lr_scheduler": schedule, "rng": rng_state(), "version": version}
            write_file(extra, extra_file(folder, self._rank, self._size))
        self._pending = self._write(folder, contents)

    @abstractmethod
    def _write(self, folder: Path, contents: list[str]) -> PendingSave:
        """Write model and optimiser, as far as `contents` has them."""

    @abstractmethod
    def _read(self, folder: Path, contents: list[str]) -> None:
        """Read them back."""

    def save_hugging_face(self, folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
        """A folder that transformers can load. Every rank helps to gather, the first writes."""
        if self._rank == 0:
            save_pretrained(self._module, folder / "huggingface", weights)
        else:
            for _ in weights:
                pass

    def is_saved(self) -> bool:
        return self._pending is None or self._pending.done()

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()

    def load(self, folder: Path, contents: list[str]) -> dict[str, Any] | None:
        """Restore weights, optimiser and random generators; returns the rest of the state."""
        self._read(folder, contents)
        if "extra" not in contents:
            return None
        extra: dict[str, Any] = read_extra(folder, self._rank, self._size)
        try:
            restore_rng(extra["rng"])
        except DAMAGE as error:
            raise CheckpointError(
                f"{folder} is damaged: its extra state restores no random generators: {error}"
            ) from error
        return extra


class Checkpoint(RoleCheckpoint):
    """Of an engine of PyTorch's modules."""

    def __init__(
        self,
        root: nn.Module,
        module: nn.Module,
        optimizer: Optimizer | None,
        config: CheckpointConfig,
    ) -> None:
        super().__init__(module, config)
        self._root = root
        self._optimizer = optimizer

    def _write(self, folder: Path, contents: list[str]) -> PendingSave:
        state = self._root, self._optimizer, folder, contents
        if self._config.layout == "classic":
            save_classic(*state)
            return PendingSave()
        return save_distributed(*state, asynchronous=self.is_asynchronous)

    def _read(self, folder: Path, contents: list[str]) -> None:
        load(self._root, self._optimizer, folder, contents)
