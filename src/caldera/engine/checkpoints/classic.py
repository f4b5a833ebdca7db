"""The layout `classic`: one file a rank, with the place of each part in the whole tensor."""

from __future__ import annotations

import io
import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from torch.futures import Future
from torch.optim import Optimizer

from caldera.engine.checkpoints.loading import (
    OptimizerState,
    is_wrapped,
    load_parts,
    model_tensors,
    optimizer_names,
    optimizer_state,
)
from caldera.engine.checkpoints.safe_loading import load_file
from caldera.engine.checkpoints.storage import DAMAGE, GROUPS, MODEL, STATE, VALUES, has_peers
from caldera.errors import CheckpointError


class Position:
    """The place of a rank in the meshes of the tensors that it wrote."""

    def __init__(self, rank: int, ranks: int, values: Iterable[Any]) -> None:
        self._rank = rank
        self._ranks = ranks
        self._by_name: dict[str, int] = {}
        for value in values:
            if isinstance(value, DTensor):
                names, shape = _mesh(value)
                if names is not None and math.prod(shape) == ranks:
                    self._by_name.update(zip(names, _unravelled(rank, shape), strict=True))

    def offset(self, tensor: DTensor) -> tuple[int, ...]:
        """Where this rank's part begins; a ValueError says why that cannot be told."""
        place, shape = self._coordinates(tensor), _mesh(tensor)[1]
        offset, size = [0] * tensor.dim(), list(tensor.shape)
        # Tensor parallelism cuts first: FSDP, which comes earlier in the mesh, cuts what is left.
        for dim in sorted(range(len(shape)), key=lambda dim: _is_strided(tensor, dim)):
            cut = tensor.placements[dim]
            if isinstance(cut, Partial):
                raise ValueError("it holds parts of sums")
            axis = getattr(cut, "dim", None)
            if axis is None:
                continue
            step = -(-size[axis] // shape[dim])
            begin = min(place[dim] * step, size[axis])
            offset[axis] += begin
            size[axis] = min(step, size[axis] - begin)
        held = tuple(tensor.to_local().shape)
        if tuple(size) != held:
            raise ValueError(f"its part should be {tuple(size)}, not {held}")
        return tuple(offset)

    def _coordinates(self, tensor: DTensor) -> list[int]:
        names, shape = _mesh(tensor)
        if math.prod(shape) == self._ranks:
            return _unravelled(self._rank, shape)
        if names is None or not set(names) <= self._by_name.keys():
            raise ValueError(f"its mesh {shape} does not say which of {self._ranks} ranks it is of")
        return [self._by_name[name] for name in names]


def _mesh(tensor: DTensor) -> tuple[tuple[str, ...] | None, tuple[int, ...]]:
    """The names and sizes of a mesh's dimensions, in files of older versions of torch too."""
    held = vars(tensor.device_mesh)
    older = held.get("mesh")
    if isinstance(older, Tensor):
        return held.get("mesh_dim_names"), tuple(older.shape)
    return tensor.device_mesh.mesh_dim_names, tuple(tensor.device_mesh.shape)


def _unravelled(rank: int, shape: tuple[int, ...]) -> list[int]:
    """The coordinates of a rank, the last dimension running fastest."""
    found = []
    for size in reversed(shape):
        found.append(rank % size)
        rank //= size
    return found[::-1]


def _is_strided(tensor: DTensor, dim: int) -> bool:
    return getattr(tensor.placements[dim], "split_factor", 1) > 1


# ---- Reading the files that ranks wrote each for itself, as one storage that holds whole tensors

CONFIG = "fsdp_config.json"
OUTDATED = (
    "holds ShardedTensors of torch's, which are outdated and not read: write the checkpoint again "
    "with a device_mesh for FullyShardedDataParallel, which makes DTensors"
)
SHARDED = "torch.distributed._shard.sharded_tensor."
NOT_ITS_PROCESS = ("before loading ShardedTensor", "at save time was")
"""Torch's message when another process than wrote a ShardedTensor reads it."""
_FILE = re.compile(r"(model|optim)_world_size_(\d+)_rank_\d+\.pt$")


def file_of(folder: Path, kind: str, rank: int, ranks: int) -> Path:
    """Where a rank writes its part of the model (`model`) or the optimiser (`optim`)."""
    return folder / f"{kind}_world_size_{ranks}_rank_{rank}.pt"


def ranks_of(folder: Path) -> int | None:
    """How many ranks wrote the folder; None if it holds no such files."""
    found = {int(match[2]) for path in folder.glob("*.pt") if (match := _FILE.match(path.name))}
    if not found:
        return None
    config = folder / CONFIG
    if len(found) > 1 and config.is_file():
        found &= {json.loads(config.read_text())["world_size"]}
    if len(found) != 1:
        raise CheckpointError(f"{folder} holds files of several numbers of ranks")
    return found.pop()


def read_files(folder: Path, kind: str, ranks: int) -> list[dict[str, Any]] | None:
    """Each rank's file, its tensors still on disk; None if no rank has written such a file."""
    paths = [file_of(folder, kind, rank, ranks) for rank in range(ranks)]
    missing = [path for path in paths if not path.is_file()]
    if len(missing) == ranks:
        return None
    if missing:
        raise CheckpointError(f"{missing[0]} is missing: the checkpoint is incomplete")
    files = [read_file(path) for path in paths]
    for path, file in zip(paths, files, strict=True):
        if not (_is_optimizer(file) if kind == "optim" else all(isinstance(k, str) for k in file)):
            raise CheckpointError(f"{path} is damaged: it holds no state of this kind")
    return files


def read_file(path: Path) -> dict[str, Any]:
    try:
        with _quiet_meshes():
            found = load_file(path, path, mmap=True)
    except CheckpointError as error:
        if SHARDED not in str(error):
            raise
        raise CheckpointError(f"{path} {OUTDATED}") from error
    except DAMAGE as error:
        if any(text in str(error) for text in NOT_ITS_PROCESS):
            raise CheckpointError(f"{path} {OUTDATED}") from error
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: it holds a {type(found).__name__}")
    if any(isinstance(value, ShardedTensor) for value in found.values()):
        raise CheckpointError(f"{path} {OUTDATED}")
    return found


def _is_optimizer(file: dict[str, Any]) -> bool:
    """Whether this is the state_dict of an optimiser."""
    state, groups = file.get("state"), file.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        return False
    if not all(isinstance(one, dict) and isinstance(one.get("params"), list) for one in groups):
        return False
    numbers = {number for group in groups for number in group["params"]}
    return all(number in numbers and isinstance(kept, dict) for number, kept in state.items())


def has_flat_pieces(file: dict[str, Any]) -> bool:
    """Whether one of several ranks kept pieces of flattened parameters, which have no names."""
    kept = [value for values in file["state"].values() for value in values.values()]
    tensors = [value for value in kept if isinstance(value, Tensor) and value.dim() > 0]
    return any(not isinstance(value, DTensor) for value in tensors)


class ClassicReader(StorageReader):
    """The files `model_world_size_{W}_rank_{R}.pt` and `optim_world_size_{W}_rank_{R}.pt`."""

    def __init__(
        self, folder: Path, contents: Collection[str], trained: Sequence[str] | None = None
    ) -> None:
        """`trained`: names of the parameters that the optimiser trains, in the model's order, for
        files that count them instead of naming them."""
        self._folder = folder
        self._parts: dict[str, dict[tuple[int, ...], Tensor]] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._objects: dict[str, Any] = {}
        ranks = ranks_of(folder)
        if ranks is None:
            raise CheckpointError(f"{folder} holds no files model_world_size_W_rank_R.pt")
        if "model" in contents and (files := read_files(folder, "model", ranks)):
            self._add([{MODEL + name: one for name, one in file.items()} for file in files])
        if "optimizer" in contents and (files := read_files(folder, "optim", ranks)):
            self._add_optimizer(files, trained)
        self._check_complete()

    def _add_optimizer(self, files: list[dict[str, Any]], trained: Sequence[str] | None) -> None:
        groups = _named_groups(files[0]["param_groups"], trained, self._folder)
        names = {
            number: name
            for group, saved in zip(groups, files[0]["param_groups"], strict=True)
            for number, name in zip(saved["params"], group["params"], strict=True)
        }
        values: dict[str, dict[str, Any]] = {}
        flat: list[dict[str, Any]] = []
        for file in files:
            flat.append({})
            for number, kept in file["state"].items():
                for key, value in kept.items():
                    if isinstance(value, Tensor):
                        flat[-1][f"{STATE}{names[number]}.{key}"] = value
                    else:
                        values.setdefault(names[number], {})[key] = value
        self._add(flat)
        self._objects |= {GROUPS: groups, VALUES: values}

    def _add(self, files: list[dict[str, Any]]) -> None:
        for rank, file in enumerate(files):
            position = Position(rank, len(files), file.values())
            for key, value in file.items():
                if not isinstance(value, Tensor):
                    raise CheckpointError(f"{self._folder}: {key} is no tensor: {type(value)}")
                offset, part = (0,) * value.dim(), value
                if isinstance(value, DTensor):
                    try:
                        offset, part = position.offset(value), value.to_local()
                    except ValueError as error:
                        raise CheckpointError(
                            f"{self._folder}: {key} of rank {rank} cannot be placed: {error}"
                        ) from error
                self._shapes.setdefault(key, value.shape)
                if part.numel() > 0 or value.numel() == 0:
                    self._parts.setdefault(key, {}).setdefault(offset, part)

    def _check_complete(self) -> None:
        for key, parts in self._parts.items():
            found, whole = (
                sum(part.numel() for part in parts.values()),
                math.prod(self._shapes[key]),
            )
            if found != whole:
                raise CheckpointError(
                    f"{self._folder} is incomplete: {found} of {whole} elements of {key}"
                )

    # ---- what torch.distributed.checkpoint asks for

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        stored: dict[str, Any] = {key: BytesStorageMetadata() for key in self._objects}
        for key, parts in self._parts.items():
            kind = TensorProperties(dtype=next(iter(parts.values())).dtype)
            chunks = [
                ChunkStorageMetadata(torch.Size(offset), part.shape)
                for offset, part in parts.items()
            ]
            stored[key] = TensorStorageMetadata(kind, self._shapes[key], chunks)
        return Metadata(stored)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                packed = io.BytesIO()
                torch.save(self._objects[key], packed)
                packed.seek(0)
                planner.load_bytes(item, packed)
                continue
            part = self._parts[key][tuple(item.storage_index.offset or ())]
            for dim, (begin, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                part = part.narrow(dim, begin, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is nothing to forget: a reader is of one folder."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """All is read already, but for the tensors' elements."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _named_groups(
    groups: list[dict[str, Any]], trained: Sequence[str] | None, folder: Path
) -> list[dict[str, Any]]:
    """The groups with names instead of numbers under `params`."""
    if all("param_names" in group for group in groups):
        return [{**group, "params": group["param_names"]} for group in groups]
    count = sum(len(group["params"]) for group in groups)
    if trained is None or len(groups) != 1 or count != len(trained):
        raise CheckpointError(
            f"{folder} is of another optimiser: it trains {count} parameters in {len(groups)} "
            f"groups, this run {len(trained or ())}"
        )
    return [{**groups[0], "params": list(trained)}]


@contextmanager
def _quiet_meshes() -> Iterator[None]:
    """torch warns of each tensor whose mesh has no processes here; none is used as a mesh."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def save_classic(
    root: nn.Module, optimizer: Optimizer | None, folder: Path, contents: Collection[str]
) -> None:
    """Write `model` and `optimizer`, as far as `contents` has them; to be called by every rank.

    When it returns, all ranks have written.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if has_peers() else (0, 1)
    tensors = model_tensors(root)
    if not any(isinstance(one, DTensor) and one.device_mesh.size() > 1 for one in tensors.values()):
        ranks = 1
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] | None = None
    if "optimizer" in contents and optimizer is not None:
        state = _numbered(optimizer_state(root, optimizer), ranks)
    if rank < ranks:
        if "model" in contents:
            _save(
                {name: _part(one, ranks) for name, one in tensors.items()},
                file_of(folder, "model", rank, ranks),
            )
        if state is not None:
            _save(state, file_of(folder, "optim", rank, ranks))
    if rank == 0:
        version = 2 if isinstance(root, FSDPModule) else 1
        (folder / CONFIG).write_text(json.dumps({"FSDP_version": version, "world_size": ranks}))
    if has_peers():
        dist.barrier()


def load_classic(
    root: nn.Module, optimizer: Optimizer | None, folder: Path, contents: Collection[str]
) -> None:
    """Give the parts among `contents` the state in the folder; to be called by every rank.

    Any number of ranks and any strategy reads what any other wrote.
    """
    wanted = {part for part in contents if part != "optimizer" or optimizer is not None}
    trained = None
    if "optimizer" in wanted and optimizer is not None:
        if _load_flat_pieces(root, optimizer, folder):
            wanted.remove("optimizer")
        else:
            known = {name for group in optimizer_names(root, optimizer) for name in group}
            trained = [name for name in model_tensors(root) if name in known]
    reader = ClassicReader(folder, wanted, trained)
    load_parts(root, optimizer, reader, folder, wanted)


def open_classic(folder: Path, contents: Collection[str], trained: Sequence[str]) -> ClassicReader:
    """The folder for a model that is no root; `trained` are its parameters, in its order."""
    ranks = _ranks_with_flat_pieces(folder) if "optimizer" in contents else None
    if ranks is not None:
        raise _flat_pieces(folder, ranks)
    return ClassicReader(folder, contents, trained)


def _numbered(state: OptimizerState, ranks: int) -> dict[str, Any]:
    """As an optimiser's own state_dict, which numbers parameters; their names stand beside."""
    numbers: dict[str, int] = {}
    groups = []
    for group in state.groups:
        names = group["params"]
        numbers |= {name: number for number, name in enumerate(names, start=len(numbers))}
        groups.append({**group, "params": [numbers[name] for name in names], "param_names": names})
    values = {
        numbers[name]: {key: _part(value, ranks) for key, value in kept.items()}
        for name, kept in state.values.items()
    }
    return {"state": values, "param_groups": groups}


def _part(value: Any, ranks: int) -> Any:
    return value.to_local() if isinstance(value, DTensor) and ranks == 1 else value


def _save(state: dict[str, Any], path: Path) -> None:
    try:
        torch.save(state, path)
    except (OSError, RuntimeError) as error:  # the latter is what torch makes of a full disk
        raise CheckpointError(f"{path} could not be written: {error}") from error


def _load_flat_pieces(root: nn.Module, optimizer: Optimizer, folder: Path) -> bool:
    """Load an optimiser whose files hold pieces of flattened parameters, if they do.

    FullyShardedDataParallel's own state has neither names nor shapes: it fits the same number of
    ranks, wrapped in the same way, and nothing else.
    """
    ranks = _ranks_with_flat_pieces(folder)
    if ranks is None:
        return False
    own = None
    if has_peers() and dist.get_world_size() == ranks:
        own = read_file(file_of(folder, "optim", dist.get_rank(), ranks))
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if own is None or not is_wrapped(root) or not _fits(own["state"], parameters):
        raise _flat_pieces(folder, ranks)
    optimizer.load_state_dict(own)
    return True


def _ranks_with_flat_pieces(folder: Path) -> int | None:
    """How many wrote such files; None if these are others."""
    ranks = ranks_of(folder)
    if ranks is None or ranks == 1 or not file_of(folder, "optim", 0, ranks).is_file():
        return None
    return ranks if has_flat_pieces(read_file(file_of(folder, "optim", 0, ranks))) else None


def _flat_pieces(folder: Path, ranks: int) -> CheckpointError:
    return CheckpointError(
        f"{folder}: the optimiser's files hold pieces of flattened parameters, which only "
        f"strategy=fsdp on {ranks} ranks with the same wrapping can read; without optimizer in "
        "checkpoint.load_contents the optimiser starts anew"
    )


def _fits(state: dict[int, dict[str, Any]], parameters: list[Tensor]) -> bool:
    return all(
        number < len(parameters) and value.shape == parameters[number].shape
        for number, kept in state.items()
        for value in kept.values()
        if isinstance(value, Tensor) and value.dim() > 0
    )
