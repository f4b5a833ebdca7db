"""Checkpoints of one engine: what is written where, by which rank, and when it is complete."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from caldera.config import CheckpointConfig
from caldera.engine.checkpoints import PendingSave, load, save_classic, save_distributed
from caldera.engine.layout import Layout
from caldera.engine.packed_model import PREFIX
from caldera.engine.state_files import extra_file, read_extra, restore_rng, rng_state, write_file
from caldera.models.loading import save_pretrained


class Checkpoint:
    """Weights and optimiser of a layout, and each rank's own state beside them."""

    def __init__(
        self, layout: Layout, optimizer: Optimizer | None, config: CheckpointConfig
    ) -> None:
        self._layout = layout
        self._optimizer = optimizer
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
        state = self._layout.root, self._optimizer, folder, contents, PREFIX
        if self._config.layout == "classic":
            save_classic(*state)
        else:
            self._pending = save_distributed(*state, asynchronous=self.is_asynchronous)

    def save_hugging_face(self, folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
        """A folder that transformers can load. Every rank helps to gather, the first writes."""
        if self._rank == 0:
            save_pretrained(self._layout.packed.inner, folder / "huggingface", weights)
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
        load(self._layout.root, self._optimizer, folder, contents, PREFIX)
        if "extra" not in contents:
            return None
        extra: dict[str, Any] = read_extra(folder, self._rank, self._size)
        restore_rng(extra["rng"])
        return extra
