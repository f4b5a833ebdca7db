"""Checkpoints of either layout, by one process that has no model: what is in them, and whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer

from caldera.engine.checkpoints.classic import ClassicReader, load_classic, open_classic, ranks_of
from caldera.engine.checkpoints.distributed import FOLDER, load_distributed
from caldera.engine.checkpoints.safe_loading import SafeReader
from caldera.engine.checkpoints.storage import MODEL, read_alone, stored_metadata, stored_under
from caldera.errors import CheckpointError


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint's model."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def layout_of(folder: Path) -> Literal["dist", "classic"]:
    """Which layout a role's folder has."""
    if (folder / FOLDER).is_dir():
        return "dist"
    if ranks_of(folder) is not None:
        return "classic"
    raise CheckpointError(
        f"{folder} holds no checkpoint: neither a folder {FOLDER} nor files "
        "model_world_size_W_rank_R.pt"
    )


def load(
    root: nn.Module,
    optimizer: Optimizer | None,
    folder: Path,
    contents: Collection[str],
) -> None:
    """`load_distributed` or `load_classic`, whichever the folder needs, if it is needed."""
    if "model" in contents or ("optimizer" in contents and optimizer is not None):
        chosen = load_distributed if layout_of(folder) == "dist" else load_classic
        chosen(root, optimizer, folder, contents)


def open_folder(folder: Path, contents: Collection[str], trained: Sequence[str]) -> StorageReader:
    """The folder's tensors, whatever its layout; `trained` are the names of the parameters."""
    if layout_of(folder) == "dist":
        return SafeReader(folder / FOLDER)
    return open_classic(folder, contents, trained)


class StoredModel:
    """The model of a role's folder, whose tensors are read whole, one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader: StorageReader
        if layout_of(folder) == "dist":
            self._reader = SafeReader(folder / FOLDER)
        else:
            self._reader = ClassicReader(folder, {"model"})
        self._metadata = stored_metadata(self._reader, folder)
        self.tensors = {
            name: Stored(one.size, one.properties.dtype)
            for name, one in stored_under(MODEL, self._metadata).items()
        }
        """The tensors, by name."""

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        stored = self.tensors[name]
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        read_alone({MODEL + name: whole}, self._reader, self._metadata, self._folder)
        return whole


def read_whole(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of a role's model, one at a time, read by a separate process."""
    model = StoredModel(folder)
    for name in model.tensors:
        yield name, model.tensor(name)
