"""Checkpoints in verl's classic layout: one file of the model and one of the optimiser a rank.

    model_world_size_{W}_rank_{R}.pt     this rank's part of each tensor, as a DTensor
    optim_world_size_{W}_rank_{R}.pt     the optimiser's state_dict, split alike
    fsdp_config.json                     which FSDP, and W

Where nothing is split, rank 0 writes plain tensors as the one rank of W = 1.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from caldera.engine.checkpoints.classic_files import (
    CONFIG,
    ClassicReader,
    file_of,
    has_flat_pieces,
    ranks_of,
    read_file,
)
from caldera.engine.checkpoints.loading import load_parts
from caldera.engine.checkpoints.parts import (
    OptimizerState,
    is_wrapped,
    model_tensors,
    optimizer_names,
    optimizer_state,
)
from caldera.engine.checkpoints.storage import has_peers
from caldera.errors import CheckpointError


def save_classic(
    root: nn.Module,
    optimizer: Optimizer | None,
    folder: Path,
    contents: Collection[str],
    prefix: str = "inner.",
) -> None:
    """Write `model` and `optimizer`, as far as `contents` has them; to be called by every rank.

    When it returns, all ranks have written.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if has_peers() else (0, 1)
    tensors = model_tensors(root, prefix)
    if not any(isinstance(one, DTensor) and one.device_mesh.size() > 1 for one in tensors.values()):
        ranks = 1
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] | None = None
    if "optimizer" in contents and optimizer is not None:
        state = _numbered(optimizer_state(root, optimizer, prefix), ranks)
    if rank < ranks:
        if "model" in contents:
            _save({name: _part(one, ranks) for name, one in tensors.items()},
                  file_of(folder, "model", rank, ranks))  # fmt: skip
        if state is not None:
            _save(state, file_of(folder, "optim", rank, ranks))
    if rank == 0:
        version = 2 if isinstance(root, FSDPModule) else 1
        (folder / CONFIG).write_text(json.dumps({"FSDP_version": version, "world_size": ranks}))
    if has_peers():
        dist.barrier()


def load_classic(
    root: nn.Module,
    optimizer: Optimizer | None,
    folder: Path,
    contents: Collection[str],
    prefix: str = "inner.",
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
            known = {name for group in optimizer_names(root, optimizer, prefix) for name in group}
            trained = [name for name in model_tensors(root, prefix) if name in known]
    reader = ClassicReader(folder, wanted, trained)
    load_parts(root, optimizer, reader, folder, wanted, prefix)


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
