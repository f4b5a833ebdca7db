"""From rows to the micro-batches that Megatron's schedules take."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.nn import functional as F

from caldera.engine.base import ForwardPlan
from caldera.engine.megatron.groups import Places
from caldera.engine.packing import PackedRows, pack_ends, pack_rows
from caldera.models.attention import PackedSequences
from caldera.models.ulysses import SharedSequences
from caldera.protocol import DataProto, tensors_of
from caldera.protocol.balance import micro_batches_by_count, micro_batches_by_tokens


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
