"""Layout: how a model lies on the ranks. Everything else about training is the same for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from caldera.core_algos import LossScale
from caldera.engine.base import EngineOptions
from caldera.engine.packed_model import PackedModel
from caldera.errors import ConfigError
from caldera.models.attention import PackedSequences
from caldera.models.exact_norm import in_exactness
from caldera.models.forward import decoder_layers
from caldera.models.loading import enable_checkpointing
from caldera.models.ulysses import ALONE, SequenceGroup, SharedSequences


class Layout(ABC):
    """The ranks that hold a model, and what they must do together.

    Rows of a mini-batch are split among `dp_size` ranks. Ranks that share tokens or matrices
    have the same rows.
    """

    root: nn.Module
    """The module to call: the packed model, or its wrapper."""
    packed: PackedModel
    is_whole: bool
    """Whether each rank holds all of every parameter."""
    dp_rank: int = 0
    dp_size: int = 1
    is_dp_leader: bool = True
    model_parallel_size: int = 1
    sequence: SequenceGroup = ALONE

    @abstractmethod
    def loss_scale(self, mask: Tensor) -> LossScale:
        """The counts of the mini-batch whose rows on this rank have this loss mask (B, R)."""

    @abstractmethod
    def least_micro_batches(self, own: int) -> int:
        """How many micro-batches to cut at least, where this rank alone would cut `own`.

        Ranks that meet in each forward pass need the same number.
        """

    @abstractmethod
    def finish_gradients(self) -> None:
        """After the last micro-batch: give every rank the gradients of all."""

    @abstractmethod
    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to this norm; returns the norm of all that they had."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by their Hugging Face (or peft) names, perhaps as shards."""

    @abstractmethod
    def whole(self, tensor: Tensor) -> Tensor:
        """All of what may be a shard; every rank must ask for the same tensors in one order."""

    def rest(self) -> None:  # noqa: B027  # most have gathered nothing
        """Give back what a forward pass without gradients has gathered."""

    @abstractmethod
    def move(self, device: torch.device) -> None:
        """Bring the parameters to a device."""

    @abstractmethod
    def check(self) -> None:
        """Complain if ranks that should hold the same weights do not."""

    def wait(self) -> None:
        """Return once every rank has come here."""
        if dist.is_available() and dist.is_initialized():
            dist.barrier()


def strip(name: str, prefix: str) -> str:
    """A name without its prefix, which it must have."""
    assert name.startswith(prefix), name
    return name[len(prefix) :]


# ---- Data-parallel ranks: each holds all weights and has its own rows of every mini-batch
#
# The launcher initialises torch.distributed; a process without it is the only
# rank. Ranks may cut their rows into different numbers of micro-batches: they meet before the first
# one and after the last one, never in between.

BUCKET_BYTES = 64 * 2**20
"""Gradients that are averaged in one message."""
COMPARED = 16
"""Elements of each parameter that are compared between ranks."""


class Ranks:
    """This process among the ranks that train the same model."""

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
        """All ranks hold the same weights, as far as a sample of each parameter shows."""
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


# ---- What every layout does to a module before it lays it out

COMPILED_CONTEXTS = (PackedSequences, SharedSequences)
"""Forward passes with these are training's. Samplers that use the same module bring others."""


def prepare_module(module: nn.Module, options: EngineOptions) -> None:
    """Freeze, checkpoint and compile as the options say."""
    if options.optim is None:
        module.requires_grad_(False)
    if options.gradient_checkpointing:
        enable_checkpointing(module)
    if options.compiles:
        compile_layers(module)


def compile_layers(module: nn.Module) -> None:
    """Compile each layer's forward, for training alone. All layers share the compiled code."""
    for layer in decoder_layers(module):
        layer.forward = _compiled_for_training(layer.forward)


def _compiled_for_training(forward: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(forward, dynamic=True)

    def choose(*args: Any, **kwargs: Any) -> Any:
        is_training = isinstance(kwargs.get("context"), COMPILED_CONTEXTS) and not in_exactness()
        return (compiled if is_training else forward)(*args, **kwargs)

    return choose
