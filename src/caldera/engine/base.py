"""Engine: one model with its optimiser, wherever and however it is laid out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from caldera.config import CheckpointConfig, FSDPConfig, OptimizerConfig
from caldera.config.megatron import MegatronConfig
from caldera.core_algos import LossScale
from caldera.models.flops import Arithmetic
from caldera.models.pretrained import WeightSource
from caldera.protocol import DataProto, tensors_of
from caldera.protocol.balance import micro_batches_by_count, micro_batches_by_tokens
from caldera.registry import Registry

if TYPE_CHECKING:
    from caldera.engine.packed_model import PackedRows
    from caldera.engine.saving import RoleCheckpoint

OutputName = Literal["log_probs", "entropy", "sum_pi_squared", "full_kl", "values", "scores"]

Outputs = dict[OutputName, Tensor]
"""The outputs of a forward pass, each (B, R) and 0 outside the response mask.

`scores` is a classifier's verdict of each whole sequence, at its last token, else 0; it is
computed alone. Everything else is of a token given those before it.
"""

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]

LossFn = Callable[[Outputs, DataProto, LossScale], LossAndMetrics]
"""(outputs of a micro-batch, its rows, denominators of the whole mini-batch) -> loss and metrics.

Losses and metrics of the micro-batches are summed, and of several ranks the mean is taken, so each
must be its share of the whole.
"""


@dataclass(frozen=True)
class ForwardPlan:
    """What to compute, and how many rows or tokens to take at a time."""

    outputs: tuple[OutputName, ...]
    by_tokens: bool
    """Micro-batches hold at most `max_tokens` tokens; else `micro_batch_size` rows."""
    micro_batch_size: int | None
    max_tokens: int | None
    temperature: float = 1.0
    reference: Engine | None = None
    """`full_kl` is the distance from this engine's model, without its adapter. It may be the very
    engine that runs the plan: its reference is then itself, less the adapter."""
    classic: bool = False
    """Each micro-batch is averaged on its own, and weighs as many rows as it has; what comes out
    depends on the split. Else the whole mini-batch is averaged."""
    rows_together: int = 1
    """Rows come in groups of so many, and a micro-batch has all of a group or none."""

    def __post_init__(self) -> None:
        assert ("full_kl" in self.outputs) == (self.reference is not None), "one needs the other"
        assert "scores" not in self.outputs or len(self.outputs) == 1, "scores are computed alone"


class FrozenStates(NamedTuple):
    """The outputs of a frozen model for packed tokens, before its head."""

    hidden: Tensor  # (n, H)
    head: Tensor  # (V, H)


@dataclass(frozen=True)
class EngineOptions:
    """How a role's model is held and trained."""

    memory: FSDPConfig
    optim: OptimizerConfig | None = None
    """None: the model is frozen."""
    grad_clip: float = 0.0
    """Largest gradient norm; 0: any."""
    sequence_parallel: int = 1
    """Ranks that share the tokens of a micro-batch."""
    gradient_checkpointing: bool = False
    activation_offload: bool = False
    compiles: bool = False
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    megatron: MegatronConfig | None = None
    """How Megatron lays the model out; in other engines `memory` decides that."""


class Engine(ABC):
    """The seam between roles and training back ends.

    Rows of a mini-batch are split among `dp_size` ranks. Ranks that share tokens or matrices have
    the same rows.
    """

    device: torch.device
    module: nn.Module
    """The Hugging Face model, or the peft wrapper around it. Its parameters may be shards."""
    is_whole: bool
    """Whether this rank holds all of every parameter."""
    arithmetic: Arithmetic
    version: int = 0
    """Changes whenever the weights may have changed."""
    dp_rank: int = 0
    dp_size: int = 1
    """This rank's place among the ranks that have different rows of a mini-batch."""
    is_dp_leader: bool = True
    """Whether this rank represents the ranks that have the same rows."""
    model_parallel_size: int = 1
    """How many have the same rows, and share the work on them."""
    sequence_parallel_size: int = 1
    """How many of these share tokens; the others share matrices."""
    _checkpoint: RoleCheckpoint
    _schedule: LRScheduler | None = None
    """Of the learning rate; None: the model is frozen."""

    @abstractmethod
    def infer(self, batch: DataProto, plan: ForwardPlan) -> Outputs:
        """Outputs of every row, without gradients, on the CPU."""

    @abstractmethod
    def train(self, mini_batch: DataProto, loss_fn: LossFn, plan: ForwardPlan) -> dict[str, Tensor]:
        """One optimiser step, on this rank's rows of the mini-batch.

        The new weights do not depend on the split into ranks and micro-batches, unless the plan is
        `classic`. The metrics, `grad_norm` among them, are this rank's shares: their mean over
        ranks is the whole's value. They are scalars that are still on the device:
        reading one waits for it.
        """

    @abstractmethod
    def frozen_states(self, packed: PackedRows) -> FrozenStates:
        """Of the model without its adapter, in evaluation mode, without gradients."""

    @abstractmethod
    def step_schedule(self) -> float:
        """Advance the learning-rate schedule by one training step; returns the rate just used."""

    @abstractmethod
    def export_weights(self, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Stream of (Hugging Face name, full tensor), an adapter `merged` or left out."""

    @abstractmethod
    def adapter_weights(self) -> dict[str, Tensor]:
        """The full tensors of the adapter, under peft's names; every rank must ask."""

    def rest(self) -> None:  # noqa: B027 -- most have gathered nothing
        """Give back what passes without gradients have gathered."""

    @abstractmethod
    def onload(self, optimizer: bool = False) -> None:
        """Bring offloaded parameters, and the optimiser's state if asked, to the device."""

    @abstractmethod
    def offload(self) -> None:
        """Send parameters and optimiser state to host memory where the config asks for it."""

    # ---- checkpoints

    def save(self, folder: Path, contents: list[str]) -> None:
        """Write model, optimiser and the rest of the state into the folder.

        Every rank calls it. When it returns, the weights may change; the folder is complete once
        `wait_for_save` has returned on all ranks.
        """
        schedule = None if self._schedule is None else self._schedule.state_dict()
        self._checkpoint.save(folder, contents, schedule, self.version)
        if "hf_model" in contents:
            self._checkpoint.save_hugging_face(folder, self.export_weights())
        if not self._checkpoint.is_asynchronous and ranks() > 1:
            dist.barrier()

    def is_saved(self) -> bool:
        """Whether the last `save` has written everything, so that `wait_for_save` need not wait."""
        return self._checkpoint.is_saved()

    def wait_for_save(self) -> None:
        """Return, or raise what went wrong, once the last `save` has written everything."""
        self._checkpoint.wait()

    def load(self, folder: Path, contents: list[str]) -> None:
        """Read back what `save` wrote, on this or another number of ranks, by any engine."""
        extra = self._checkpoint.load(folder, contents)
        if extra is not None:
            self.version = extra["version"]
            if self._schedule is not None:
                self._schedule.load_state_dict(extra["lr_scheduler"])
                self._apply_rate()

    @abstractmethod
    def _apply_rate(self) -> None:
        """Give the schedule's learning rate to the optimiser, which may not have been read back."""

    # ---- one mini-batch

    def _loss_scale(self, mask: Tensor) -> LossScale:
        """The counts of the mini-batch whose rows on this rank have this loss mask (B, R)."""
        scale = LossScale.from_mask(mask, self.dp_size)
        if self.dp_size * self.model_parallel_size == 1:
            return scale
        own = (scale.batch_num_tokens, scale.global_batch_size)
        counts = torch.stack([torch.as_tensor(count) for count in own])
        dist.all_reduce(counts)  # on the host: rows are still there
        counts //= self.model_parallel_size  # ranks that have the same rows have counted them too
        tokens, rows = counts.to(self.device, non_blocking=True)
        return replace(scale, batch_num_tokens=tokens, global_batch_size=rows)

    def _micro_batches(self, batch: DataProto, plan: ForwardPlan) -> list[list[int]]:
        """The rows of each."""
        together = plan.rows_together
        if not plan.by_tokens:
            assert plan.micro_batch_size is not None, "the config's check asks for it"
            return micro_batches_by_count(len(batch), plan.micro_batch_size, together)
        assert plan.max_tokens is not None
        most = plan.max_tokens * self.sequence_parallel_size
        lengths = tensors_of(batch)["attention_mask"].sum(1).tolist()
        cut = micro_batches_by_tokens(lengths, most, together=together)
        needed = self._least_micro_batches(len(cut))
        if len(cut) < needed <= len(batch) // together:
            return micro_batches_by_tokens(lengths, most, needed, together)
        return cut

    def _least_micro_batches(self, own: int) -> int:
        """How many micro-batches to cut at least, where this rank alone would cut `own`: ranks that
        meet in each forward pass need the same number."""
        most = torch.tensor(own)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)


def ranks() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


EngineFactory = Callable[[nn.Module, WeightSource | None, torch.device, EngineOptions], Engine]
"""(module, where the values of its parameters come from if they are on the meta device, device)."""

ENGINES: Registry[EngineFactory] = Registry("training strategy")
