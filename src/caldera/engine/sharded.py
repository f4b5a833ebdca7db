"""The base of both kinds of FSDP."""

from __future__ import annotations

from collections import Counter
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from caldera.engine.base import EngineOptions
from caldera.engine.checkpoints.loading import model_tensors
from caldera.engine.packed_model import PackedModel
from caldera.engine.training import TrainingEngine, compute_dtype
from caldera.errors import ConfigError
from caldera.models.forward import base_module, decoder_layers
from caldera.models.pretrained import VALUE_HEAD, WeightSource
from caldera.models.support import rope_kind
from caldera.models.ulysses import SequenceGroup

# ---- The ranks as a mesh: replicas x shards x tensor parallel, and the groups that share tokens
#
# Rank numbers count the tensor-parallel place fastest, then the shard, then the replica. Ranks that
# share tokens (Ulysses) are neighbours among replicas x shards.

REPLICAS, SHARDS, MATRICES = "replicas", "shards", "matrices"


def _check_sizes(tensor: int, sequence: int, rope: str) -> None:
    """The ranks can be arranged so; `rope`: kind of positions."""
    world = dist.get_world_size()
    for key, size in {
        "fsdp_config.tensor_parallel_size": tensor,
        "ulysses_sequence_parallel_size": sequence,
        "the two of them together": tensor * sequence,
    }.items():
        if world % size:
            raise ConfigError(f"{key}={size} does not divide the {world} ranks")
    if sequence > 1 and rope in ("dynamic", "longrope"):
        raise ConfigError(
            f"ulysses_sequence_parallel_size={sequence}: the model's rotary embedding ({rope}) "
            "depends on the longest sequence, of which each rank would see a part; takes 1"
        )


def _mesh(device: torch.device, fsdp_size: int, rest: int, tensor: int) -> DeviceMesh:
    shards = rest if fsdp_size in (-1, 0) else min(fsdp_size, rest)
    if rest % shards:
        raise ConfigError(f"fsdp_config.fsdp_size={shards} does not divide {rest} ranks")
    sizes, names = (rest // shards, shards, tensor), (REPLICAS, SHARDS, MATRICES)
    return init_device_mesh(device.type, sizes, mesh_dim_names=names)


def _sequence_group(rest: int, tensor: int, size: int) -> SequenceGroup:
    """This rank's group of `size` neighbours; every rank takes part in making all groups."""
    if size == 1:
        return SequenceGroup()
    own = dist.get_rank()
    found = SequenceGroup()
    for matrix_rank in range(tensor):
        for start in range(0, rest, size):
            members = [place * tensor + matrix_rank for place in range(start, start + size)]
            group = dist.new_group(members)
            if own in members:
                found = SequenceGroup(members.index(own), size, group)
    return found


class ShardedEngine(TrainingEngine):
    """Every rank holds a part of each parameter, and all ranks meet in each forward pass."""

    is_whole = False

    def __init__(
        self,
        module: nn.Module,
        source: WeightSource | None,
        device: torch.device,
        options: EngineOptions,
    ) -> None:
        assert source is not None, "a sharded engine is given a module without weights"
        self._source = source
        tensor, sequence = options.memory.tensor_parallel_size, options.sequence_parallel
        _check_sizes(tensor, sequence, rope_kind(module))
        rest = dist.get_world_size() // tensor
        whole = _mesh(device, options.memory.fsdp_size, rest, tensor)
        self._sharding = whole[SHARDS] if whole[SHARDS].size() == rest else whole[REPLICAS, SHARDS]
        """The meshes that shard parameters: shards, or replicas x shards."""
        self._matrices = whole[MATRICES] if tensor > 1 else None
        """Tensor parallel ranks; None where every rank computes with whole matrices."""
        self._sequence = _sequence_group(rest, tensor, sequence)
        place, matrix_rank = divmod(dist.get_rank(), tensor)
        self.dp_rank, self.dp_size = place // sequence, rest // sequence
        self.is_dp_leader = place % sequence == 0 and matrix_rank == 0
        self.model_parallel_size = tensor * sequence
        super().__init__(module, device, options)

    def _finish_gradients(self) -> None:
        """FSDP has averaged them on the way."""

    def _tensors(self) -> dict[str, Tensor]:
        return model_tensors(self.root)

    def _whole(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        there = cast(DTensor, tensor.to(self.device))  # where the ranks can talk
        return there.full_tensor()


def units(packed: PackedModel, options: EngineOptions) -> list[nn.Module]:
    """The parts that are gathered and dropped whole; what is left over belongs to the root."""
    inner = packed.inner
    least = options.memory.wrap_policy.min_num_params
    if least > 0:
        tied = _tied(inner)
        large = _large_parts(base_module(inner).base_model, least)
        # A weight that the head shares belongs to the root, which holds the head.
        found = [part for part in large if not tied & {id(p) for p in part.parameters()}]
    else:
        found = decoder_layers(inner)
    head = precise_head(packed, options)
    return found if head is None else [*found, head]


def precise_head(packed: PackedModel, options: EngineOptions) -> nn.Module | None:
    """A value head that is more precise than what the rest computes in, and stays so."""
    head = getattr(base_module(packed.inner), VALUE_HEAD, None)
    if not isinstance(head, nn.Module):
        return None
    computed = compute_dtype(options) or next(packed.parameters()).dtype
    return None if next(head.parameters()).dtype == computed else head


def _tied(module: nn.Module) -> set[int]:
    """The parameters that go by several names, by identity."""
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    return {parameter for parameter, count in uses.items() if count > 1}


def _large_parts(module: nn.Module, least: int) -> list[nn.Module]:
    """The innermost parts with at least so many parameters."""
    found: list[nn.Module] = []
    for child in module.children():
        inner = _large_parts(child, least)
        if not inner and sum(p.numel() for p in child.parameters()) >= least:
            inner = [] if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
        found += inner
    return found
