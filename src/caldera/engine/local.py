"""strategy=local: every rank has the whole model on its device, CPU or GPU.

Ranks have different rows of every mini-batch. They may cut these into different numbers of
micro-batches: they meet before the first one and after the last one, never in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from caldera.engine.base import ENGINES, EngineOptions, ranks
from caldera.engine.training import TrainingEngine, compute_dtype
from caldera.errors import ConfigError
from caldera.models.forward import move
from caldera.models.pretrained import WeightSource

BUCKET_BYTES = 64 * 2**20
"""Gradients that are averaged in one message."""
COMPARED = 16
"""Elements of each parameter that are compared between ranks."""


class LocalEngine(TrainingEngine):
    """Trains a module that is whole."""

    is_whole = True

    def __init__(self, module: nn.Module, device: torch.device, options: EngineOptions) -> None:
        self.dp_size = ranks()
        self.dp_rank = dist.get_rank() if self.dp_size > 1 else 0
        super().__init__(module, device, options, compute_dtype(options))

    def _lay_out(self, options: EngineOptions) -> nn.Module:
        return self.packed.to(self.device)

    def _least_micro_batches(self, own: int) -> int:
        return own

    def _finish_gradients(self) -> None:
        """Give every rank the mean of all ranks' gradients, the same to the last bit."""
        if self.dp_size == 1:
            return
        trained = [parameter for parameter in self.root.parameters() if parameter.requires_grad]
        has_gradient = [parameter.grad is not None for parameter in trained]
        on_any = torch.tensor(has_gradient, dtype=torch.int32, device=self.device)
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
            flat /= self.dp_size
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def _clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.root.parameters(), max_norm)

    def _tensors(self) -> dict[str, Tensor]:
        return dict(self.module.state_dict())

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def _move(self, device: torch.device) -> None:
        for tensor in (*self.root.parameters(), *self.root.buffers()):
            tensor.data = move(tensor.data, device)

    def _check(self) -> None:
        """All ranks hold the same weights, as far as a sample of each parameter shows."""
        if self.dp_size == 1:
            return
        names, starts = [], []
        for name, parameter in self.module.named_parameters():
            start = parameter.detach().flatten()[:COMPARED].double().nan_to_num()
            names += [name] * len(start)
            starts.append(start)
        lowest = torch.cat(starts).to(self.device)
        highest = lowest.clone()
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        different = (lowest != highest).nonzero().flatten().tolist()
        if different:
            raise ConfigError(
                f"the {self.dp_size} ranks hold different weights, of {names[different[0]]} and "
                f"{len({names[place] for place in different}) - 1} other parameters: the model's "
                "files, or the seeds, are not the same for all of them"
            )


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


@ENGINES.register("local")
def build_local(
    module: nn.Module, source: WeightSource | None, device: torch.device, options: EngineOptions
) -> LocalEngine:
    assert source is None, "a local engine is given a module with its weights"
    for key, value, takes in (
        ("ulysses_sequence_parallel_size", options.sequence_parallel, 1),
        ("fsdp_config.tensor_parallel_size", options.memory.tensor_parallel_size, 1),
        ("fsdp_config.offload_policy", options.memory.offload_policy, False),
    ):
        if value != takes:
            told = str(takes).lower()
            raise ConfigError(f"{key}={value}: strategy=local takes {told}; fsdp2 can")
    return LocalEngine(module, device, options)
