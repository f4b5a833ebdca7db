"""Checkpoints of a model and its optimiser, which any layout of ranks reads.

Two layouts on disk: that of torch.distributed.checkpoint (`dist`), and one file a rank (`classic`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer

from caldera.engine.checkpoints.classic import ClassicReader, load_classic, open_classic, ranks_of
from caldera.engine.checkpoints.loading import (
    OptimizerState,
    load_parts,
    model_tensors,
    optimizer_state,
)
from caldera.engine.checkpoints.safe_loading import SafeReader
from caldera.engine.checkpoints.storage import (
    MODEL,
    flat_model,
    flat_optimizer,
    has_peers,
    read_alone,
    stored_metadata,
    stored_under,
    write,
)
from caldera.errors import CheckpointError

# ---- The layout `dist`: named tensors, by torch.distributed.checkpoint
#
#     model.{parameter}                     a tensor of the model
#     optimizer.state.{parameter}.{key}     a tensor that the optimiser keeps
#     optimizer.values                      what it keeps besides: {parameter: {key: value}}
#     optimizer.param_groups                its groups, with the names of their parameters
#
# A tensor may be split in any way when it is written, and in any other way when it is read.


FOLDER = "dist_ckpt"
"""The folder within a role's that holds the files."""


class PendingSave:
    """A checkpoint that is being written, or has been."""

    def __init__(
        self, written: Future[None] | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        self._written = written
        self._group = group

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._written is None or self._written.done()

    def wait(self) -> None:
        """Return once all ranks have written; a failure while writing is raised, by every rank.

        A failure stays one: each later wait raises it again.
        """
        if self._written is None:
            return
        try:
            self._written.result()
        finally:
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None


def save_distributed(
    root: nn.Module,
    optimizer: Optimizer | None,
    folder: Path,
    contents: Collection[str],
    asynchronous: bool = False,
) -> PendingSave:
    """Write `model` and `optimizer`, as far as `contents` has them; to be called by every rank.

    `asynchronous` copies the state to the CPU's memory and writes it while training goes on.
    """
    tensors = model_tensors(root) if "model" in contents else None
    kept = None
    if "optimizer" in contents and optimizer is not None:
        kept = optimizer_state(root, optimizer)
    return save_named(tensors, kept, folder, asynchronous)


def save_named(
    tensors: dict[str, Tensor] | None,
    kept: OptimizerState | None,
    folder: Path,
    asynchronous: bool = False,
    are_copies: bool = False,
) -> PendingSave:
    """Write a model's tensors and what its optimiser keeps; to be called by every rank.

    Ranks may have different tensors, or parts of the same ones. None is what nobody has.
    `are_copies`: the tensors are in the CPU's memory, and nobody else has them.
    """
    if tensors is None and kept is None:
        return PendingSave()
    state = flat_model(tensors or {})
    if kept is not None:
        state |= flat_optimizer(kept)
    writer = FileSystemWriter(folder / FOLDER)
    if not asynchronous:
        write(state, writer, None)
        return PendingSave()
    # A separate group: its messages must not mix with those of training.
    group = dist.new_group(backend="gloo") if has_peers() else None
    staged = state if are_copies else writer.stage(state)
    thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    written = thread.submit(write, staged, writer, group)
    thread.shutdown(wait=False)
    return PendingSave(written, group)


def load_distributed(
    root: nn.Module, optimizer: Optimizer | None, folder: Path, contents: Collection[str]
) -> None:
    """Give the parts among `contents` the state in the folder; to be called by every rank."""
    load_parts(root, optimizer, SafeReader(folder / FOLDER), folder, contents)


# ---- Either layout


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
    root: nn.Module, optimizer: Optimizer | None, folder: Path, contents: Collection[str]
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
