"""Moving named tensors to and from a folder, by torch.distributed.checkpoint."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from caldera.engine.checkpoints.safe_loading import SafeLoadPlanner
from caldera.errors import CheckpointError
from caldera.storage.locks import full_disk

if TYPE_CHECKING:
    from caldera.engine.checkpoints.loading import OptimizerState

MODEL = "model."
STATE = "optimizer.state."
VALUES = "optimizer.values"
GROUPS = "optimizer.param_groups"

# Errors that reading a damaged file may raise: pickle names most of these.
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
    """The tensors of the folder: names, shapes, types."""
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
