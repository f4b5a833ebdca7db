"""Filling a model and its optimiser from a checkpoint of either layout."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.tensor as dtensor
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

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
from caldera.engine.packed_model import PREFIX
from caldera.errors import CheckpointError

# ---- The state of a root module and its optimiser, as tensors under the names of the inner module
#
# A root is plain, wrapped by FullyShardedDataParallel, or sharded by fully_shard, where its layers
# may be split by tensor parallelism too. Sharded tensors are DTensors, of which a rank holds its
# part: nothing here gathers more than one layer at a time.

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Prefixes that wrappers add to the names of parameters."""
MANNER = ("capturable", "differentiable", "foreach", "fused")
"""Options that say how an optimiser computes, not what: they stay as it was built."""


@dataclass
class OptimizerState:
    """The state of an optimiser, by names of parameters."""

    groups: list[dict[str, Any]]
    """The options of each group, and the names of its parameters under `params`."""
    values: dict[str, dict[str, Any]]
    """The state of each parameter: tensors and plain values."""


def is_wrapped(root: nn.Module) -> bool:
    """Whether the root is sharded by FullyShardedDataParallel, which flattens parameters."""
    return isinstance(root, FullyShardedDataParallel)


def model_tensors(root: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the model: its own memory, or copies of the parts of a wrapped root."""
    _reshard(root)
    with _without_warnings():
        state = get_model_state_dict(root)
    return {name.removeprefix(PREFIX): cast(Tensor, value) for name, value in state.items()}


def restore_model(root: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give the model the tensors that `model_tensors` told, filled meanwhile."""
    if is_wrapped(root):  # all others are the model's own memory
        with _without_warnings():
            set_model_state_dict(root, {PREFIX + name: value for name, value in tensors.items()})


def optimizer_names(root: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters in each group of the optimiser."""
    if isinstance(root, FullyShardedDataParallel):
        groups = optimizer.state_dict()["param_groups"]
        found = _named_by_wrapper(root, optimizer, {"state": {}, "param_groups": groups})
        return [group["params"] for group in found.groups]
    names = _names(root)
    return [[names[one] for one in group["params"]] for group in optimizer.param_groups]


def optimizer_state(root: nn.Module, optimizer: Optimizer) -> OptimizerState:
    """The optimiser's state: its own memory, or copies of the parts of a wrapped root."""
    _reshard(root)
    if isinstance(root, FullyShardedDataParallel):
        return _named_by_wrapper(root, optimizer, optimizer.state_dict())
    names = _names(root)
    groups = [
        {**group, "params": [names[one] for one in group["params"]]}
        for group in optimizer.param_groups
    ]
    return OptimizerState(groups, {names[one]: dict(kept) for one, kept in optimizer.state.items()})


def restore_optimizer(root: nn.Module, optimizer: Optimizer, state: OptimizerState) -> None:
    """Have the optimiser remember this and nothing else; its groups are those it was built with."""
    saved = {name: group for group in state.groups for name in group["params"]}
    names_of_groups = optimizer_names(root, optimizer)
    for group, names in zip(optimizer.param_groups, names_of_groups, strict=True):
        for option, value in saved[names[0]].items() if names else ():
            if option not in ("params", "param_names", *MANNER):
                group[option] = value
    optimizer.state.clear()
    if isinstance(root, FullyShardedDataParallel):
        kept = _flattened_by_wrapper(root, optimizer, state)
    else:
        parameters = {name: one for one, name in _names(root).items()}
        kept = {parameters[name]: values for name, values in state.values.items()}
    for group in optimizer.param_groups:
        for one in group["params"]:
            if one in kept:
                optimizer.state[one] = _placed(kept[one], one, group)


def _placed(kept: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """Single numbers are on the parameter's device, but a count of steps only where that helps."""
    count_there = bool(group.get("fused") or group.get("capturable"))
    return {
        key: value.to(parameter.device)
        if isinstance(value, Tensor) and value.dim() == 0 and (key != "step" or count_there)
        else value
        for key, value in kept.items()
    }


def _names(root: nn.Module) -> dict[Tensor, str]:
    found: dict[Tensor, str] = {}
    for name, parameter in root.named_parameters():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        found[parameter] = name.removeprefix(PREFIX)
    return found


def _reshard(root: nn.Module) -> None:
    """A forward pass without gradient leaves the root's own parameters gathered."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _named_by_wrapper(
    root: FullyShardedDataParallel, optimizer: Optimizer, state: dict[str, Any]
) -> OptimizerState:
    with _sharded_states(root):
        named = FullyShardedDataParallel.optim_state_dict(root, optimizer, state)
    for group in named["param_groups"]:
        group["params"] = [name.removeprefix(PREFIX) for name in group["params"]]
    values = {name.removeprefix(PREFIX): kept for name, kept in named["state"].items()}
    return OptimizerState(named["param_groups"], values)


def _flattened_by_wrapper(
    root: FullyShardedDataParallel, optimizer: Optimizer, state: OptimizerState
) -> dict[Tensor, dict[str, Any]]:
    named = {
        "state": {PREFIX + name: kept for name, kept in state.values.items()},
        "param_groups": [
            {**group, "params": [PREFIX + name for name in group["params"]]}
            for group in state.groups
        ],
    }
    with _sharded_states(root):
        flat = FullyShardedDataParallel.optim_state_dict_to_load(root, optimizer, named)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return {parameters[place]: kept for place, kept in flat["state"].items()}


@contextmanager
def _sharded_states(root: FullyShardedDataParallel) -> Iterator[None]:
    with (
        _without_warnings(),
        FullyShardedDataParallel.state_dict_type(
            root,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig(),
        ),
    ):
        yield


@contextmanager
def _without_warnings() -> Iterator[None]:
    """torch calls itself outdated each time that a state is taken from its own wrapper."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


SHOWN = 3
"""Names that an error lists before it counts the rest."""


def load_parts(
    root: nn.Module,
    optimizer: Optimizer | None,
    reader: StorageReader,
    folder: Path,
    contents: Collection[str],
) -> None:
    """Give the parts among `contents` the state that the reader finds."""
    metadata = stored_metadata(reader, folder)
    tensors = model_tensors(root)
    if "model" in contents:
        check_model(tensors, metadata, folder)
        read(flat_model(tensors), reader, folder)
        restore_model(root, tensors)
    if "optimizer" in contents and optimizer is not None:
        names = optimizer_names(root, optimizer)
        state = _optimizer_state(names, tensors, reader, metadata, folder, is_wrapped(root))
        restore_optimizer(root, optimizer, state)


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
    """The folder's state of the optimiser, split among the ranks as the parameters are."""
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
    """The folder's state of the optimiser but for its tensors.

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
