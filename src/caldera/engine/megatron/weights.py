"""Weights in and out: one Hugging Face tensor at a time in, buckets of them out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from caldera.engine.megatron.groups import Places
from caldera.engine.megatron.names import Piece
from caldera.errors import UnsupportedError
from caldera.models.fresh import WeightSource

BUCKET_BYTES = 256 * 2**20
"""Whole tensors that exist at the same time; a larger one is alone."""


@dataclass(frozen=True)
class Shard:
    """What this rank has of one Hugging Face tensor."""

    local: Tensor
    """A copy where the parameter holds it in another order."""
    dimension: int | None
    """That tensor-parallel ranks cut, as `torch.chunk` does; None: each has all of it."""
    experts: slice | None
    """Of a tensor of all experts, those that are here: places in its first dimension, which
    expert-parallel ranks cut evenly."""
    shape: torch.Size
    """Of the whole tensor."""
    stages: tuple[int, ...]
    """Pipeline ranks that have it: one, or the first and the last for a tied embedding."""


class Weights:
    """This rank's pieces by the names of their Hugging Face tensors, and who has the others."""

    def __init__(self, pieces: list[Piece], model: PreTrainedModel, places: Places) -> None:
        self._places = places
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            self._pieces[piece.name].append(piece)
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._tied = dict(model.all_tied_weights_keys)
        own = {name: held[0].parameter.dtype for name, held in self._pieces.items()}
        all_own: list[dict[str, torch.dtype]] = [{} for _ in range(places.pp_size)]
        dist.all_gather_object(all_own, own, group=places.pp_group)
        self._stages: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for name in self._shapes:
            stored = name if any(name in held for held in all_own) else self._tied.get(name, name)
            stages = tuple(rank for rank, held in enumerate(all_own) if stored in held)
            if not stages:
                raise UnsupportedError(
                    f"strategy=megatron: {type(model).__name__} has the parameter {name}, which is "
                    "not known"
                )
            self._stages[name], self._dtypes[name] = stages, all_own[stages[0]][stored]

    def pieces(self) -> dict[str, list[Piece]]:
        """This rank's, by Hugging Face name; one, or one for each expert that is here."""
        return dict(self._pieces)

    def shards(self) -> dict[str, Shard]:
        """This rank's part of each Hugging Face tensor that it has."""
        found = {}
        for name, held in self._pieces.items():
            experts, first = None, held[0]
            local = first.read()
            if first.expert is not None:
                experts = slice(first.expert, first.expert + len(held))
                local = torch.stack([piece.read() for piece in held])
            stages = self._stages[name]
            tied = self._tied.get(name)
            if tied is not None:
                stages = tuple(sorted({*self._stages[tied], *stages}))
            found[name] = Shard(local, first.dimension, experts, self._shapes[name], stages)
        return found

    def fill(self, source: WeightSource) -> None:
        """Give the parameters their values; each rank reads every tensor of which it has a part."""
        for name, held in self._pieces.items():
            self.write(name, source.tensor(name), held)

    def write(self, name: str, whole: Tensor, held: list[Piece] | None = None) -> None:
        """Keep this rank's part of a whole tensor."""
        for piece in self._pieces[name] if held is None else held:
            piece.write(self.part(piece, whole))

    def part(self, piece: Piece, whole: Tensor) -> Tensor:
        """Of a whole Hugging Face tensor, what the piece is."""
        if piece.expert is not None:
            return whole[piece.expert]
        if piece.dimension is None or self._places.tp_size == 1:
            return whole
        parts = whole.chunk(self._places.tp_size, piece.dimension)
        rank = self._places.tp_rank
        return parts[rank] if rank < len(parts) else whole.narrow(piece.dimension, 0, 0)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of all, on every rank, which all have to go through them."""
        for stage, names in groupby(self._shapes, lambda name: self._stages[name][0]):
            for bucket in self._buckets(names):
                yield from self._spread(stage, bucket)

    def _buckets(self, names: Iterator[str]) -> Iterator[list[str]]:
        bucket: list[str] = []
        filled = 0
        for name in names:
            size = self._shapes[name].numel() * self._dtypes[name].itemsize
            changes = bucket and self._dtypes[name] != self._dtypes[bucket[0]]
            if bucket and (changes or filled + size > BUCKET_BYTES):
                yield bucket
                bucket, filled = [], 0
            bucket.append(name)
            filled += size
        if bucket:
            yield bucket

    def _spread(self, stage: int, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of one pipeline stage, given to all others in one message."""
        places = self._places
        if places.pp_size == 1:
            yield from ((name, self._gather(name)) for name in names)
            return
        device = next(iter(self._pieces.values()))[0].parameter.device
        sizes = [self._shapes[name].numel() for name in names]
        if places.pp_rank == stage:
            flat = torch.cat([self._gather(name).flatten() for name in names])
        else:
            flat = torch.empty(sum(sizes), dtype=self._dtypes[names[0]], device=device)
        dist.broadcast(flat, group=places.pp_group, group_src=stage)
        for name, part in zip(names, flat.split(sizes), strict=True):
            yield name, part.view(self._shapes[name])

    def _gather(self, name: str) -> Tensor:
        """The whole tensor from the ranks of this stage."""
        held = self._pieces[name if name in self._pieces else self._tied[name]]
        first, places = held[0], self._places
        if first.expert is not None:
            local = torch.stack([piece.read() for piece in held])
            return local if places.ep_size == 1 else _joined(local, 0, places.ep_group)
        local = first.read()
        if first.dimension is None or places.tp_size == 1:
            return local
        whole = self._shapes[name][first.dimension]
        missing = -(-whole // places.tp_size) - local.shape[first.dimension]
        if missing:
            before = [0, 0] * (local.dim() - 1 - first.dimension)
            local = F.pad(local, [*before, 0, missing])
        joined = _joined(local, first.dimension, places.tp_group)
        return joined.narrow(first.dimension, 0, whole)


def _joined(local: Tensor, dimension: int, group: dist.ProcessGroup) -> Tensor:
    local = local.contiguous()
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local, group=group)
    return torch.cat(parts, dimension)
