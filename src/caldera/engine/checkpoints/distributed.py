"""Checkpoints of torch.distributed.checkpoint, which any number of ranks and any strategy reads."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.optim import Optimizer

from caldera.engine.checkpoints.loading import (
    OptimizerState,
    load_parts,
    model_tensors,
    optimizer_state,
)
from caldera.engine.checkpoints.safe_loading import SafeReader
from caldera.engine.checkpoints.storage import flat_model, flat_optimizer, has_peers, write

# ---- Moving named tensors to and from a folder, by torch.distributed.checkpoint model.{parameter}
# a tensor of the model
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
    root: nn.Module,
    optimizer: Optimizer | None,
    folder: Path,
    contents: Collection[str],
) -> None:
    """Give the parts among `contents` the state in the folder; to be called by every rank."""
    load_parts(root, optimizer, SafeReader(folder / FOLDER), folder, contents)
