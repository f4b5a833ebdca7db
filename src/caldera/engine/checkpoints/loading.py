"""Filling a model and its optimiser from a checkpoint of either layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor as dtensor
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from caldera.engine.checkpoints.parts import (
    OptimizerState,
    is_wrapped,
    model_tensors,
    optimizer_names,
    restore_model,
    restore_optimizer,
)
from caldera.engine.checkpoints.storage import (
    GROUPS,
    MODEL,
    STATE,
    VALUES,
    flat_model,
    read,
    read_alone,
    stored_metadata,
    stored_under,
)
from caldera.errors import CheckpointError

SHOWN = 3
"""Names that an error lists before it counts the rest."""


def load_parts(
    root: nn.Module,
    optimizer: Optimizer | None,
    reader: StorageReader,
    folder: Path,
    contents: Collection[str],
    prefix: str,
) -> None:
    """Give the parts among `contents` the state that the reader finds."""
    metadata = stored_metadata(reader, folder)
    tensors = model_tensors(root, prefix)
    if "model" in contents:
        check_model(tensors, metadata, folder)
        read(flat_model(tensors), reader, folder)
        restore_model(root, tensors, prefix)
    if "optimizer" in contents and optimizer is not None:
        names = optimizer_names(root, optimizer, prefix)
        state = _optimizer_state(names, tensors, reader, metadata, folder, is_wrapped(root))
        restore_optimizer(root, optimizer, state, prefix)


def check_model(tensors: dict[str, Tensor], metadata: Metadata, folder: Path) -> None:
    """Complain unless the folder holds tensors of these names and shapes."""
    stored = stored_under(MODEL, metadata)
    if not stored:
        raise CheckpointError(
            f"{folder} holds no model: checkpoint.save_contents left it out, "
            "checkpoint.load_contents has to do so too"
        )
    told = []
    if missing := [name for name in tensors if name not in stored]:
        told.append(f"the checkpoint lacks {_some(missing)}")
    if unexpected := [name for name in stored if name not in tensors]:
        told.append(f"the model lacks {_some(unexpected)}")
    others = [
        f"{name}, {tuple(stored[name].size)} instead of {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in stored and stored[name].size != tensor.shape
    ]
    if others:
        told.append(f"of another shape is {_some(others)}")
    if told:
        raise CheckpointError(f"{folder} is of another model: {'; '.join(told)}")


def _optimizer_state(
    names: list[list[str]],
    tensors: dict[str, Tensor],
    reader: StorageReader,
    metadata: Metadata,
    folder: Path,
    flattens: bool,
) -> OptimizerState:
    """What the folder holds of the optimiser, split among the ranks as the parameters are."""
    plain = read_plain_state(names, reader, metadata, folder)
    values: dict[str, dict[str, Any]] = {}
    targets: dict[str, Any] = {}
    for key, stored in stored_under(STATE, metadata).items():
        name, _, kept = key.rpartition(".")
        like = tensors[name]
        if flattens and len(stored.size) > 0 and stored.size != like.shape:
            raise CheckpointError(
                f"{folder}: the optimiser's {kept} of {name} has the shape {tuple(stored.size)}, "
                f"its parameter {tuple(like.shape)}: strategy=fsdp cannot split it, fsdp2 can"
            )
        targets[STATE + key] = values.setdefault(name, {})[kept] = _empty(stored, like)
    read(targets, reader, folder)
    for name, kept_values in plain.values.items():
        values.setdefault(name, {}).update(kept_values)
    return OptimizerState(plain.groups, values)


def read_plain_state(
    names: list[list[str]], reader: StorageReader, metadata: Metadata, folder: Path
) -> OptimizerState:
    """What the folder holds of the optimiser but for its tensors.

    Complains unless it trains the parameters with these names, which are those of each group.
    """
    if GROUPS not in metadata.state_dict_metadata:
        raise CheckpointError(
            f"{folder} holds no optimiser: checkpoint.save_contents left it out, "
            "checkpoint.load_contents has to do so too"
        )
    plain: dict[str, Any] = {GROUPS: None, VALUES: None}
    read_alone(plain, reader, metadata, folder)
    _check_groups(names, plain[GROUPS], folder)
    return OptimizerState(plain[GROUPS], plain[VALUES])


def _check_groups(names: list[list[str]], groups: list[dict[str, Any]], folder: Path) -> None:
    group_of = {name: place for place, group in enumerate(groups) for name in group["params"]}
    trained = [name for group in names for name in group]
    told = []
    if missing := [name for name in trained if name not in group_of]:
        told.append(f"the checkpoint does not train {_some(missing)}")
    if unexpected := [name for name in group_of if name not in set(trained)]:
        told.append(f"this run does not train {_some(unexpected)}")
    if told:
        raise CheckpointError(f"{folder} is of another optimiser: {'; '.join(told)}")
    for group in names:
        if len({group_of[name] for name in group}) > 1:
            raise CheckpointError(
                f"{folder} is of another optimiser: parameters of one group, "
                f"{_some(group)}, are in several there"
            )


def _empty(stored: TensorStorageMetadata, like: Tensor) -> Tensor:
    """Memory for a tensor that an optimiser keeps of a parameter.

    Where it is not of the parameter's shape, such as sums over rows, every rank has all of it.
    """
    dtype = stored.properties.dtype
    if len(stored.size) == 0:
        return torch.empty((), dtype=dtype)
    if stored.size == like.shape:
        return torch.empty_like(like, dtype=dtype)
    if not isinstance(like, DTensor):
        return torch.empty(stored.size, dtype=dtype, device=like.device)
    mesh = like.device_mesh
    everywhere = [Replicate()] * mesh.ndim
    whole = dtensor.empty(stored.size, dtype=dtype, device_mesh=mesh, placements=everywhere)
    return whole.to(like.device)  # which is not the mesh's where parameters are offloaded


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - SHOWN
    return ", ".join(listed[:SHOWN]) + (f" and {more} more" if more > 0 else "")
