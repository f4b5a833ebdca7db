"""Checkpoints of torch.distributed.checkpoint, which any number of ranks and any strategy reads."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer

from caldera.engine.checkpoints.loading import (
    OptimizerState,
    load_parts,
    model_tensors,
    optimizer_state,
)
from caldera.engine.checkpoints.safe_loading import SafeLoadPlanner, SafeReader
from caldera.errors import CheckpointError
from caldera.storage.locks import full_disk

# ---- Moving named tensors to and from a folder, by torch.distributed.checkpoint model.{parameter}
# a tensor of the model
#     optimizer.state.{parameter}.{key}     a tensor that the optimiser keeps
#     optimizer.values                      what it keeps besides: {parameter: {key: value}}
#     optimizer.param_groups                its groups, with the names of their parameters
#
# A tensor may be split in any way when it is written, and in any other way when it is read.

MODEL = "model."
STATE = "optimizer.state."
VALUES = "optimizer.values"
GROUPS = "optimizer.param_groups"
# What reading a damaged file may raise: pickle names most of these.
DAMAGE = (
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


def has_peers() -> bool:
    """Whether other processes may take part."""
    return dist.is_available() and dist.is_initialized()


def flat_model(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {MODEL + name: tensor for name, tensor in tensors.items()}


def flat_optimizer(state: OptimizerState) -> dict[str, Any]:
    found: dict[str, Any] = {GROUPS: state.groups}
    values: dict[str, dict[str, Any]] = {}
    for name, kept in state.values.items():
        for key, value in kept.items():
            if isinstance(value, Tensor):
                found[f"{STATE}{name}.{key}"] = value
            else:
                values.setdefault(name, {})[key] = value
    return {**found, VALUES: values}


def write(state: dict[str, Any], writer: FileSystemWriter, group: dist.ProcessGroup | None) -> None:
    """Write all ranks' tensors; what several ranks hold alike is written once."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _failures_told(Path(writer.path), "could not be written", _why_not_written):
        if has_peers():
            state_dict_saver.save(
                state, storage_writer=writer, planner=planner, process_group=group
            )
            return
        planner.set_up_planner(state, writer.storage_meta(), is_coordinator=True)
        writer.set_up_storage_writer(is_coordinator=True)
        plans, metadata = planner.create_global_plan(
            [writer.prepare_local_plan(planner.create_local_plan())]
        )
        (plan,) = writer.prepare_global_plan(plans)
        written = writer.write_data(planner.finish_plan(plan), planner)
        written.wait()
        writer.finish(metadata, [written.value()])


def read(targets: dict[str, Any], reader: StorageReader, folder: Path) -> None:
    """Fill the tensors in `targets` from the folder, and replace what is no tensor."""
    if not has_peers():
        read_alone(targets, reader, stored_metadata(reader, folder), folder)
        return
    planner = SafeLoadPlanner(folder)
    with _failures_told(folder, "cannot be read, the checkpoint is incomplete or damaged"):
        state_dict_loader.load(targets, storage_reader=reader, planner=planner)


def read_alone(
    targets: dict[str, Any], reader: StorageReader, metadata: Metadata, folder: Path
) -> None:
    """The same for this process, whatever others there are."""
    planner = SafeLoadPlanner(folder)
    with _failures_told(folder, "cannot be read, the checkpoint is incomplete or damaged"):
        planner.set_up_planner(targets, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        (plan,) = reader.prepare_global_plan(
            planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        )
        reader.read_data(planner.finish_plan(plan), planner).wait()


def stored_metadata(reader: StorageReader, folder: Path) -> Metadata:
    """What the folder holds: names, shapes, types."""
    with _failures_told(folder, "cannot be read, the checkpoint is incomplete or damaged"):
        return reader.read_metadata()


def stored_under(prefix: str, metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors whose keys begin with `prefix`, by the rest of the key."""
    return {
        key.removeprefix(prefix): stored
        for key, stored in metadata.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(stored, TensorStorageMetadata)
    }


def _sentence(error: BaseException, folder: Path) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _why_not_written(error: BaseException, folder: Path) -> str:
    return full_disk(error, folder) or _sentence(error, folder)


@contextmanager
def _failures_told(
    folder: Path, what: str, tell: Callable[[BaseException, Path], str] = _sentence
) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if isinstance(first, CheckpointError):
            raise first from error
        raise CheckpointError(f"{folder} {what} by rank {rank}: {tell(first, folder)}") from error
    except DAMAGE as error:
        raise CheckpointError(f"{folder} {what}: {tell(error, folder)}") from error


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

        A failure stays one: whoever waits again hears of it again.
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
    prefix: str = "inner.",
    asynchronous: bool = False,
) -> PendingSave:
    """Write `model` and `optimizer`, as far as `contents` has them; to be called by every rank.

    `prefix` is where the module is in the root: names in files have none. `asynchronous` copies
    the state to the CPU's memory and writes it while training goes on.
    """
    tensors = model_tensors(root, prefix) if "model" in contents else None
    kept = None
    if "optimizer" in contents and optimizer is not None:
        kept = optimizer_state(root, optimizer, prefix)
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
    # Of its own, for what the ranks tell each other must not mix with what training does.
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
    prefix: str = "inner.",
) -> None:
    """Give the parts among `contents` the state in the folder; to be called by every rank."""
    load_parts(root, optimizer, SafeReader(folder / FOLDER), folder, contents, prefix)
