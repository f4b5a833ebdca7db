"""What both kinds of FSDP have in common."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from caldera.core_algos import LossScale
from caldera.engine.base import EngineOptions
from caldera.engine.layout import Layout, strip
from caldera.engine.meshes import Meshes
from caldera.engine.packed_model import PREFIX, PackedModel
from caldera.models.adapters import VALUE_HEAD
from caldera.models.forward import base_module, decoder_layers
from caldera.models.loading import DTYPES


class ShardedLayout(Layout):
    """Every rank holds a part of each parameter, and all ranks meet in each forward pass."""

    is_whole = False

    def __init__(self, packed: PackedModel, meshes: Meshes, device: torch.device) -> None:
        self.packed = packed
        self._meshes = meshes
        self._device = device
        self.dp_rank, self.dp_size = meshes.dp_rank, meshes.dp_size
        self.is_spokesman = meshes.is_spokesman
        self.sharers = dist.get_world_size() // meshes.dp_size
        self.sequence = meshes.sequence

    def loss_scale(self, mask: Tensor) -> LossScale:
        scale = LossScale.from_mask(mask, self.dp_size)
        own = (scale.batch_num_tokens, scale.global_batch_size)
        counts = torch.stack([torch.as_tensor(count) for count in own])
        dist.all_reduce(counts)  # on the host: rows are still there
        # Ranks that have the same rows have counted them too.
        counts //= self.sharers
        tokens, rows = counts.to(self._device, non_blocking=True)
        return replace(scale, batch_num_tokens=tokens, global_batch_size=rows)

    def least_micro_batches(self, own: int) -> int:
        most = torch.tensor(own)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    def finish_gradients(self) -> None:
        """FSDP has averaged them on the way."""

    def tensors(self) -> dict[str, Tensor]:
        state = cast(dict[str, Tensor], get_model_state_dict(self.root))
        return {strip(name, PREFIX): tensor for name, tensor in state.items()}

    def whole(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        there = cast(DTensor, tensor.to(self._device))  # where the ranks can talk
        return there.full_tensor()

    def check(self) -> None:
        """Each rank has read its own part of the same files."""


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


def compute_dtype(options: EngineOptions) -> torch.dtype | None:
    """The precision to compute in, where it is not that of the parameters."""
    memory = options.memory
    compute = DTYPES[memory.dtype or memory.model_dtype]
    return None if compute == DTYPES[memory.model_dtype] else compute
