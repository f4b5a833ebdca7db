"""Checkpoints of a Megatron engine: the files and names that all other engines write and read.

Tensors go by their Hugging Face names, in the precision in which they are updated. Ranks that hold
the same parameters take turns in writing them, from a copy in the host's memory. Every rank reads
its parts of one parameter, or of one layer's experts, at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from caldera.config import CheckpointConfig
from caldera.engine.checkpoints import PendingSave, open_folder, save_named
from caldera.engine.checkpoints.loading import OptimizerState, check_model, read_plain_state
from caldera.engine.checkpoints.storage import (
    MODEL,
    STATE,
    read_alone,
    stored_metadata,
    stored_under,
)
from caldera.engine.megatron.groups import Places
from caldera.engine.megatron.optim import Optimizer
from caldera.engine.megatron.weights import Piece, Weights
from caldera.engine.saving import RoleCheckpoint
from caldera.errors import CheckpointError
from caldera.models.forward import base_module

OPTIONS = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov")
"""Options that torch's optimisers and Megatron's call alike."""


@dataclass(frozen=True)
class Unit:
    """Parameters, and the Hugging Face tensors that lie in them."""

    parameters: list[nn.Parameter]
    """One, or one for each expert that is here."""
    tensors: dict[str, list[Piece]]
    """By name: the piece in each of the parameters."""

    @property
    def has_experts(self) -> bool:
        return next(iter(self.tensors.values()))[0].expert is not None


class MegatronCheckpoint(RoleCheckpoint):
    def __init__(
        self,
        module: nn.Module,
        weights: Weights,
        optimizer: Optimizer | None,
        places: Places,
        config: CheckpointConfig,
    ) -> None:
        super().__init__(module, config)
        model = base_module(module)
        self._optimizer = optimizer
        self._whole = model.state_dict()
        self._tied = dict(model.all_tied_weights_keys)
        names = (name for name, _ in model.named_parameters(remove_duplicate=False))
        self._trained = [name for name in names if name not in self._tied]
        self._units = _units(weights)
        # They describe which rank has which part, of tensors on the host; they send nothing.
        self._matrices = DeviceMesh.from_group(places.tp_group, "cpu")
        self._experts = DeviceMesh.from_group(places.ep_group, "cpu")
        self._copies = places.copies

    # ---- writing

    def _write(self, folder: Path, contents: list[str]) -> PendingSave:
        tensors = self._model_tensors() if "model" in contents else None
        kept = None
        if "optimizer" in contents and self._optimizer is not None:
            kept = self._optimizer_state(self._optimizer)
        return save_named(tensors, kept, folder, self.is_asynchronous, are_copies=True)

    def _model_tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for unit, is_own in self._turns():
            whole = [self._read_weight(parameter) for parameter in unit.parameters]
            if is_own:
                found |= self._named(unit, whole)
        for name, source in self._tied.items():
            if source in found:
                found[name] = found[source]
        return found

    def _optimizer_state(self, optimizer: Optimizer) -> OptimizerState:
        values: dict[str, dict[str, Any]] = {name: {} for name in self._trained}
        for unit, is_own in self._turns():
            kept = [optimizer.read_state(parameter) for parameter in unit.parameters]
            for key, value in kept[0].items() if is_own else ():
                if value.dim() == 0:
                    named = {name: value.to("cpu", copy=True) for name in unit.tensors}
                else:
                    named = self._named(unit, [one[key] for one in kept])
                for name, tensor in named.items():
                    values[name][key] = tensor
        options = optimizer.inner.param_groups[0]
        group = {key: options[key] for key in OPTIONS if key in options}
        return OptimizerState([{**group, "params": self._trained}], values)

    def _turns(self) -> Iterator[tuple[Unit, bool]]:
        """The tensors with names of their own, and whether this copy is to be written."""
        of_experts = parallel_state.get_expert_data_parallel_group()
        for number, unit in enumerate(self._units):
            if unit.tensors.keys() & self._tied.keys():
                continue  # a copy on the last stage of what the first has
            group = of_experts if unit.has_experts else self._copies
            yield unit, number % dist.get_world_size(group) == dist.get_rank(group)

    def _named(self, unit: Unit, values: list[Tensor]) -> dict[str, Tensor]:
        """Of values in the shapes of a unit's parameters, the Hugging Face tensors, as copies."""
        found = {}
        for name, pieces in unit.tensors.items():
            parts = [piece.read(value) for piece, value in zip(pieces, values, strict=True)]
            local = torch.stack(parts) if unit.has_experts else parts[0]
            found[name] = self._placed(name, pieces[0], local.to("cpu", copy=True))
        return found

    def _placed(self, name: str, piece: Piece, local: Tensor) -> Tensor:
        """This rank's part, with its place in the whole tensor."""
        if piece.expert is not None:
            mesh, dimension = self._experts, 0
        elif piece.dimension is not None:
            mesh, dimension = self._matrices, piece.dimension
        else:
            return local
        whole = self._whole[name]
        return DTensor.from_local(
            local,
            mesh,
            [Shard(dimension)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    # ---- reading

    def _read(self, folder: Path, contents: list[str]) -> None:
        wanted: set[str] = {part for part in ("model", "optimizer") if part in contents}
        if self._optimizer is None:
            wanted -= {"optimizer"}
        if not wanted:
            return
        told = None
        try:
            self._restore(folder, wanted)
        except CheckpointError as error:
            told = str(error)
        all_told: list[str | None] = [None] * self._size
        dist.all_gather_object(all_told, told)
        for one in all_told:  # of a file that one rank cannot read, all complain
            if one is not None:
                raise CheckpointError(one)

    def _restore(self, folder: Path, wanted: set[str]) -> None:
        """Without a word to other ranks, which may have failed."""
        reader = open_folder(folder, wanted, self._trained)
        files = _Files(folder, reader, stored_metadata(reader, folder))
        if "model" in wanted:
            check_model(self._whole, files.metadata, folder)
            stored = stored_under(MODEL, files.metadata)
            for unit in self._units:
                for parameter, value in zip(
                    unit.parameters, self._filled(unit, MODEL, "", stored, files), strict=True
                ):
                    self._write_weight(parameter, value)
        if "optimizer" in wanted and self._optimizer is not None:
            self._restore_optimizer(self._optimizer, files)

    def _restore_optimizer(self, optimizer: Optimizer, files: _Files) -> None:
        plain = read_plain_state([self._trained], files.reader, files.metadata, files.folder)
        stored = stored_under(STATE, files.metadata)
        kept: dict[str, list[str]] = {}
        for entry, one in stored.items():
            name, _, key = entry.rpartition(".")
            if plain.values.get(name) or (one.size and one.size != self._whole[name].shape):
                raise CheckpointError(
                    f"{files.folder} is of another optimiser: its {key} of {name} is not what "
                    "strategy=megatron keeps of a parameter"
                )
            kept.setdefault(name, []).append(key)
        for part in optimizer.inner.chained_optimizers:
            if not part.is_stub_optimizer:
                part.optimizer.state.clear()
        for unit in self._units:
            first = next(iter(unit.tensors))
            states: list[dict[str, Tensor]] = [{} for _ in unit.parameters]
            for key in kept.get(self._tied.get(first, first), ()):
                values = self._filled(unit, STATE, f".{key}", stored, files)
                for state, value in zip(states, values, strict=True):
                    state[key] = value
            for parameter, state in zip(unit.parameters, states, strict=True):
                optimizer.write_state(parameter, state)
        for group in optimizer.inner.param_groups:
            told = plain.groups[0]
            group.update({key: told[key] for key in OPTIONS if key in told and key in group})

    def _filled(
        self,
        unit: Unit,
        prefix: str,
        suffix: str,
        stored: dict[str, TensorStorageMetadata],
        files: _Files,
    ) -> list[Tensor]:
        """The files' state of a unit, in the shapes of its parameters, or single numbers."""
        targets: dict[str, Tensor] = {}
        for name, pieces in unit.tensors.items():
            source = self._tied.get(name, name)
            one = stored[source + suffix]
            shape = (len(pieces), *pieces[0].shape) if unit.has_experts else pieces[0].shape
            local = torch.empty(shape if one.size else (), dtype=one.properties.dtype)
            placed = self._placed(source, pieces[0], local) if one.size else local
            targets[prefix + source + suffix] = placed
        read_alone(dict(targets), files.reader, files.metadata, files.folder)
        parts = [one.to_local() if isinstance(one, DTensor) else one for one in targets.values()]
        if parts[0].dim() == 0:
            return parts[:1] * len(unit.parameters)
        # Rows that were added to the vocabulary are in no file.
        found = [torch.zeros(one.shape, dtype=parts[0].dtype) for one in unit.parameters]
        for pieces, part in zip(unit.tensors.values(), parts, strict=True):
            own = part.unbind() if unit.has_experts else (part,)
            for piece, value, whole in zip(pieces, own, found, strict=True):
                piece.write(value, whole)
        return found

    # ---- weights in the precision in which they are updated

    def _read_weight(self, parameter: nn.Parameter) -> Tensor:
        if self._optimizer is None or parameter.dtype == torch.float32:
            return parameter.detach()
        return self._optimizer.read_main(parameter)

    def _write_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        if self._optimizer is None:
            parameter.detach().copy_(value)
        else:
            self._optimizer.write_main(parameter, value)


@dataclass(frozen=True)
class _Files:
    folder: Path
    reader: StorageReader
    metadata: Metadata


def _units(weights: Weights) -> list[Unit]:
    def places(held: tuple[str, list[Piece]]) -> list[int]:
        return [id(piece.parameter) for piece in held[1]]

    units = []
    for _, group in groupby(weights.pieces().items(), places):
        tensors = dict(group)
        first = next(iter(tensors.values()))
        units.append(Unit([piece.parameter for piece in first], tensors))
    return units
