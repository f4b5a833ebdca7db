"""Layout: how a model lies on the ranks. Everything else about training is the same for all."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from caldera.core_algos import LossScale
from caldera.engine.packed_model import PackedModel
from caldera.models.ulysses import ALONE, SequenceGroup


class Layout(ABC):
    """The ranks that hold a model, and what they must do together.

    Rows of a mini-batch are dealt to `dp_size` ranks. Those that share tokens or matrices with
    them have the same rows.
    """

    root: nn.Module
    """What is called: the packed model, or what wraps it."""
    packed: PackedModel
    is_whole: bool
    """Whether each rank holds all of every parameter."""
    dp_rank: int = 0
    dp_size: int = 1
    is_spokesman: bool = True
    sharers: int = 1
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
