"""The ranks as a mesh: replicas x shards x tensor parallel, and the groups that share tokens.

Rank numbers count the tensor-parallel place fastest, then the shard, then the replica. Ranks that
share tokens (Ulysses) are neighbours among replicas x shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from caldera.engine.base import EngineOptions
from caldera.errors import ConfigError
from caldera.models.ulysses import SequenceGroup

REPLICAS, SHARDS, MATRICES = "replicas", "shards", "matrices"


@dataclass(frozen=True)
class Meshes:
    """Where this rank is on the mesh."""

    sharding: DeviceMesh
    """What parameters are sharded over: shards, or replicas x shards."""
    matrices: DeviceMesh | None
    """Tensor parallel ranks; None where every rank computes with whole matrices."""
    sequence: SequenceGroup
    dp_rank: int
    dp_size: int
    is_spokesman: bool


def make_meshes(device: torch.device, options: EngineOptions, rope: str = "default") -> Meshes:
    """Arrange all ranks of the process group as the options say; `rope`: kind of positions."""
    memory = options.memory
    world, rank = dist.get_world_size(), dist.get_rank()
    tensor, sequence = memory.tensor_parallel_size, options.sequence_parallel
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
    rest = world // tensor
    shards = rest if memory.fsdp_size in (-1, 0) else min(memory.fsdp_size, rest)
    if rest % shards:
        raise ConfigError(f"fsdp_config.fsdp_size={shards} does not divide {rest} ranks")
    whole = init_device_mesh(
        device.type, (rest // shards, shards, tensor), mesh_dim_names=(REPLICAS, SHARDS, MATRICES)
    )
    sharding = whole[SHARDS] if shards == rest else whole[REPLICAS, SHARDS]
    place = rank // tensor
    return Meshes(
        sharding=sharding,
        matrices=whole[MATRICES] if tensor > 1 else None,
        sequence=_sequence_group(rest, tensor, sequence),
        dp_rank=place // sequence,
        dp_size=rest // sequence,
        is_spokesman=place % sequence == 0 and rank % tensor == 0,
    )


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
