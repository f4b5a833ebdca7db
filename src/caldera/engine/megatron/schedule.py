"""Passes of all micro-batches through the pipeline, by Megatron's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from torch.nn import functional as F

from caldera.engine.base import ForwardPlan
from caldera.engine.megatron.groups import Places
from caldera.engine.packed_model import PackedRows, pack_ends, pack_rows
from caldera.models.attention import PackedSequences
from caldera.models.ulysses import SharedSequences
from caldera.protocol import DataProto, tensors_of
from caldera.protocol.balance import micro_batches_by_count, micro_batches_by_tokens

Told = TypeVar("Told")


def train_all(
    stages: list[nn.Module],
    batches: list[PackedRows],
    places: Places,
    finish: Callable[[int, Tensor], tuple[Tensor, Told]],
) -> list[Told]:
    """Gradients of the sum of the losses, averaged over the ranks that have different tokens.

    `finish` makes a loss of the hidden states of the numbered micro-batch, on the last stage, where
    alone something comes back: what it tells besides the loss, of each micro-batch in order.
    """

    def loss(number: int, hidden: Tensor) -> tuple[Tensor, Told]:
        found, told = finish(number, hidden)
        # Megatron divides by the number of micro-batches, and multiplies by that of the ranks that
        # share their tokens.
        return found * (len(batches) / places.sequence.size), told

    return _run(stages, batches, places, loss, forward_only=False)


def infer_all(
    stages: list[nn.Module],
    batches: list[PackedRows],
    places: Places,
    finish: Callable[[int, Tensor], Told],
) -> list[Told]:
    """What `finish` makes of each micro-batch's hidden states, on the last stage."""

    def outputs(number: int, hidden: Tensor, non_loss_data: bool) -> Told:
        return finish(number, hidden)

    return _run(stages, batches, places, outputs, forward_only=True, collect_non_loss_data=True)


def _run(
    stages: list[nn.Module],
    batches: list[PackedRows],
    places: Places,
    finish: Callable[..., Any],
    **options: bool,
) -> list[Any]:
    def forward(numbered: Iterator[tuple[int, PackedRows]], stage: nn.Module) -> tuple[Any, Any]:
        number, packed = next(numbered)
        hidden = stage(packed.input_ids, packed.position_ids, packed.context)
        return hidden, partial(finish, number)

    virtual = places.virtual_stages if places.virtual_stages > 1 else None
    run = get_forward_backward_func(pp_size=places.pp_size, vp_size=virtual)
    numbered = [iter(list(enumerate(batches))) for _ in stages]
    found: list[Any] = run(
        forward_step_func=forward,
        data_iterator=numbered if virtual else numbered[0],
        model=stages if virtual else stages[0],
        num_microbatches=len(batches),
        seq_length=1,  # told by each sender: micro-batches are of different lengths
        micro_batch_size=1,
        **options,
    )
    return found


# ---- From rows to the micro-batches that Megatron's schedules take


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch, by their places in it."""

    rows: list[int]
    counts: bool = True
    """Not so for one that is there to make up the number: its rows are in another one."""


def cut(batch: DataProto, plan: ForwardPlan, places: Places) -> list[MicroBatch]:
    """As many micro-batches on every rank; interleaved stages take a multiple of the stages."""
    lengths: list[int] = tensors_of(batch)["attention_mask"].sum(1).tolist()
    if plan.by_tokens:
        assert plan.max_tokens is not None
        most = plan.max_tokens * places.sequence.size
        parts = micro_batches_by_tokens(lengths, most, together=plan.rows_together)
    else:
        assert plan.micro_batch_size is not None, "the config's check asks for it"
        parts = micro_batches_by_count(len(batch), plan.micro_batch_size, plan.rows_together)
    needed = _agreed(len(parts), places)
    if plan.by_tokens and len(parts) < needed <= len(batch) // plan.rows_together:
        parts = micro_batches_by_tokens(lengths, most, needed, plan.rows_together)
    shortest = min(range(len(batch)), key=lengths.__getitem__)
    fillers = [MicroBatch([shortest], counts=False)] * (needed - len(parts))
    return [MicroBatch(rows) for rows in parts] + fillers


def _agreed(own: int, places: Places) -> int:
    most = torch.tensor(own)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    multiple = places.pp_size if places.virtual_stages > 1 else 1
    return -(-int(most) // multiple) * multiple


def pack(
    rows: DataProto, plan: ForwardPlan, device: torch.device, places: Places, multiple: int
) -> PackedRows:
    """Packed tokens, of which each context-parallel rank has a run of a multiple of `multiple`."""
    gather = pack_ends if "scores" in plan.outputs else pack_rows
    whole = gather(rows, device)
    context, sequence = whole.context, places.sequence
    assert isinstance(context, PackedSequences)
    tokens = context.total
    if missing := -tokens % (multiple * sequence.size):  # a sequence that nobody looks at
        context = PackedSequences([*context.lengths, missing], device)
        padded = F.pad(whole.input_ids, (0, missing))
        whole = replace(whole, input_ids=padded, position_ids=context.position_ids, context=context)
    if sequence.size == 1:
        return whole
    own = sequence.own(context.total)
    share = own.stop - own.start
    bounds = torch.searchsorted(
        whole.predictors.cpu(), torch.arange(sequence.size + 1) * share
    ).tolist()
    mine = slice(*bounds[sequence.rank : sequence.rank + 2])
    return replace(
        whole,
        input_ids=whole.input_ids[:, own],
        position_ids=whole.position_ids[:, own],
        context=SharedSequences(context, sequence),
        predictors=whole.predictors[mine] - own.start,
        labels=whole.labels[mine],
        counts=[bounds[rank + 1] - bounds[rank] for rank in range(sequence.size)],
        sequence=sequence,
    )
