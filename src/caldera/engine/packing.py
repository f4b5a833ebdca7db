"""From padded rows to packed tokens, and back: padding exists on neither side of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from caldera.models.attention import AttentionContext, PackedSequences
from caldera.models.transfer import send
from caldera.models.ulysses import ALONE, SequenceGroup, SharedSequences, join_tokens
from caldera.protocol import DataProto, tensors_of


@dataclass(frozen=True)
class PackedRows:
    """The tokens of some rows end to end, and at which of them something is computed.

    `pack_rows`: for each of the N response tokens that the loss can see (response_mask 1), at the
    token before it. `pack_ends`: at the last token of each of the N rows that have a response.
    Where a group of ranks shares the tokens, each has t of the T tokens and n of the N places.
    """

    input_ids: Tensor  # (1, t)
    position_ids: Tensor  # (1, t)
    context: AttentionContext
    predictors: Tensor  # (n,) indices, among the t tokens, of those at which it is computed
    labels: Tensor  # (n,) the response tokens
    cells: Tensor  # (N,) their places in the flattened (B, R) matrix
    shape: tuple[int, int]  # (B, R)
    counts: list[int]
    """n of each rank of the group."""
    longest: int
    """Tokens of the longest row."""
    sequence: SequenceGroup = ALONE

    def unpack(self, values: Tensor) -> Tensor:
        """(n,) values to a (B, R) matrix, the same on all ranks of the group; 0 elsewhere."""
        rows, width = self.shape
        flat = torch.zeros(rows * width, dtype=values.dtype, device=values.device)
        joined = join_tokens(values, self.counts, self.sequence)  # (N,)
        return flat.index_copy(0, self.cells, joined).view(rows, width)


def pack_rows(rows: DataProto, device: torch.device, sequence: SequenceGroup = ALONE) -> PackedRows:
    """Drop the padding of left-padded prompts and right-padded responses."""
    tensors = tensors_of(rows)
    response_mask = tensors["response_mask"].bool()  # (B, R)
    seen = response_mask & tensors["attention_mask"][:, -response_mask.shape[1] :].bool()
    return _pack(rows, seen, -1, device, sequence)


def pack_ends(rows: DataProto, device: torch.device, sequence: SequenceGroup = ALONE) -> PackedRows:
    """The same, to be read at each row's last token; a row without response is not read."""
    tensors = tensors_of(rows)
    width = tensors["responses"].shape[1]
    attended = tensors["attention_mask"][:, -width:].bool()  # (B, R)
    last = attended.sum(1, keepdim=True) - 1  # (B, 1)
    return _pack(rows, torch.arange(width, device=last.device) == last, 0, device, sequence)


def _pack(
    rows: DataProto, chosen: Tensor, offset: int, device: torch.device, sequence: SequenceGroup
) -> PackedRows:
    """To be read at the `chosen` response tokens (B, R), or `offset` tokens from there."""
    tensors = tensors_of(rows)
    attention = tensors["attention_mask"].bool()  # (B, P + R)
    width = chosen.shape[1]
    packed_index = attention.flatten().cumsum(0).view_as(attention) - 1  # (B, P + R)
    input_ids = tensors["input_ids"][attention]  # (T,)
    lengths: list[int] = attention.sum(1).tolist()
    if missing := -len(input_ids) % sequence.size:  # one more sequence, that nobody looks at
        input_ids = torch.cat([input_ids, input_ids.new_zeros(missing)])
        lengths = [*lengths, missing]
    whole = PackedSequences(lengths, device)
    predictors = packed_index[:, -width:][chosen] + offset  # (N,) ascending
    labels = tensors["input_ids"][:, -width:][chosen]
    share = len(input_ids) // sequence.size
    bounds = torch.searchsorted(predictors, torch.arange(sequence.size + 1) * share).tolist()
    own, mine = sequence.own(len(input_ids)), slice(*bounds[sequence.rank : sequence.rank + 2])
    return PackedRows(
        input_ids=send(input_ids[own][None], device),
        position_ids=whole.position_ids[:, own],
        context=whole if sequence.size == 1 else SharedSequences(whole, sequence),
        predictors=send(predictors[mine] - own.start, device),
        labels=send(labels[mine], device),
        cells=send(chosen.flatten().nonzero().flatten(), device),
        shape=(len(rows), width),
        counts=[bounds[r + 1] - bounds[r] for r in range(sequence.size)],
        longest=whole.max_length,
        sequence=sequence,
    )
