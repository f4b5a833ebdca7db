"""Data-parallel ranks: each holds all weights and has its own rows of every mini-batch.

Whoever starts the processes initialises torch.distributed; a process where nobody did is the only
rank. Ranks may cut their rows into different numbers of micro-batches: they meet before the first
one and after the last one, never in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from caldera.core_algos import LossScale
from caldera.errors import ConfigError

BUCKET_BYTES = 64 * 2**20
"""Gradients that are averaged in one message."""
COMPARED = 16
"""Elements of each parameter that are compared between ranks."""


class Ranks:
    """This process among those that train the same model."""

    def __init__(self, device: torch.device) -> None:
        """`device` is where the group's back end takes tensors from."""
        spread = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if spread else 0
        self.size = dist.get_world_size() if spread else 1
        self._device = device

    def loss_scale(self, mask: Tensor) -> LossScale:
        """The counts of the mini-batch whose rows on this rank have this loss mask (B, R)."""
        scale = LossScale.from_mask(mask, self.size)
        if self.size == 1:
            return scale
        own = (scale.batch_num_tokens, scale.global_batch_size)
        counts = torch.stack([torch.as_tensor(count) for count in own]).to(self._device)
        dist.all_reduce(counts)
        return replace(scale, batch_num_tokens=counts[0], global_batch_size=counts[1])

    def average_gradients(self, module: nn.Module) -> None:
        """Give every rank the mean of all ranks' gradients, the same to the last bit."""
        if self.size == 1:
            return
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        has_gradient = [parameter.grad is not None for parameter in trained]
        on_any = torch.tensor(has_gradient, dtype=torch.int32, device=self._device)
        dist.all_reduce(on_any, op=dist.ReduceOp.MAX)
        for parameter, present in zip(trained, on_any.tolist(), strict=True):
            # One that no rank has a gradient for stays without, so that no optimiser decays it.
            if present and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = (parameter.grad for parameter in trained if parameter.grad is not None)
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
            dist.all_reduce(flat)
            flat /= self.size
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def check_alike(self, module: nn.Module) -> None:
        """All ranks hold the same weights, as far as a few elements of each parameter tell."""
        if self.size == 1:
            return
        names, starts = [], []
        for name, parameter in module.named_parameters():
            start = parameter.detach().flatten()[:COMPARED].double().nan_to_num()
            names += [name] * len(start)
            starts.append(start)
        lowest = torch.cat(starts).to(self._device)
        highest = lowest.clone()
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        different = (lowest != highest).nonzero().flatten().tolist()
        if different:
            raise ConfigError(
                f"the {self.size} ranks hold different weights, of {names[different[0]]} and "
                f"{len({names[place] for place in different}) - 1} other parameters: the model's "
                "files, or the seeds, are not the same for all of them"
            )

    def wait(self) -> None:
        """Return once every rank has come here."""
        if self.size > 1:
            arrived = torch.ones(1, device=self._device)
            dist.all_reduce(arrived)
            arrived.item()  # on a GPU the call above only queues the work


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one precision, of about BUCKET_BYTES together."""
    bucket: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if bucket and (filled >= BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.nbytes
    if bucket:
        yield bucket
