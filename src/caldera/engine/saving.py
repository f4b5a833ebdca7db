"""Checkpoints of one engine: what is written where, by which rank, and when it is complete."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from caldera.config import CheckpointConfig
from caldera.engine.checkpoints import PendingSave, load, save_classic, save_distributed
from caldera.engine.layout import Layout
from caldera.engine.packed_model import PREFIX
from caldera.engine.state_files import extra_file, read_extra, restore_rng, rng_state, write_file
from caldera.models.loading import save_pretrained


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
        restore_rng(extra["rng"])
        return extra


class Checkpoint(RoleCheckpoint):
    """Of a layout of PyTorch's."""

    def __init__(
        self, layout: Layout, optimizer: Optimizer | None, config: CheckpointConfig
    ) -> None:
        super().__init__(layout.packed.inner, config)
        self._root = layout.root
        self._optimizer = optimizer

    def _write(self, folder: Path, contents: list[str]) -> PendingSave:
        state = self._root, self._optimizer, folder, contents, PREFIX
        if self._config.layout == "classic":
            save_classic(*state)
            return PendingSave()
        return save_distributed(*state, asynchronous=self.is_asynchronous)

    def _read(self, folder: Path, contents: list[str]) -> None:
        load(self._root, self._optimizer, folder, contents, PREFIX)
