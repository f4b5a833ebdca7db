"""From padded rows to packed tokens, and back: padding exists on neither side of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from caldera.models.attention import PackedSequences
from caldera.protocol import DataProto, tensors_of


@dataclass(frozen=True)
class PackedRows:
    """The tokens of some rows end to end, and at which of them something is computed.

    `pack_rows`: for each of the N response tokens that the loss can see (response_mask 1), at the
    token before it. `pack_ends`: at the last token of each of the N rows that have a response.
    """

    input_ids: Tensor  # (1, T)
    sequences: PackedSequences
    predictors: Tensor  # (N,) packed indices of the tokens at which it is computed
    labels: Tensor  # (N,) the response tokens
    cells: Tensor  # (N,) their places in the flattened (B, R) matrix
    shape: tuple[int, int]  # (B, R)

    def unpack(self, values: Tensor) -> Tensor:
        """(N,) values to a (B, R) matrix with zeros elsewhere."""
        rows, width = self.shape
        flat = torch.zeros(rows * width, dtype=values.dtype, device=values.device)
        return flat.index_copy(0, self.cells, values).view(rows, width)


def pack_rows(rows: DataProto, device: torch.device) -> PackedRows:
    """Drop the padding of left-padded prompts and right-padded responses."""
    tensors = tensors_of(rows)
    response_mask = tensors["response_mask"].bool()  # (B, R)
    seen = response_mask & tensors["attention_mask"][:, -response_mask.shape[1] :].bool()
    return _pack(rows, seen, -1, device)


def pack_ends(rows: DataProto, device: torch.device) -> PackedRows:
    """The same, to be read at each row's last token; a row without response is not read."""
    tensors = tensors_of(rows)
    width = tensors["responses"].shape[1]
    attended = tensors["attention_mask"][:, -width:].bool()  # (B, R)
    last = attended.sum(1, keepdim=True) - 1  # (B, 1)
    return _pack(rows, torch.arange(width, device=last.device) == last, 0, device)


def _pack(rows: DataProto, chosen: Tensor, offset: int, device: torch.device) -> PackedRows:
    """To be read at the `chosen` response tokens (B, R), or `offset` tokens from there."""
    tensors = tensors_of(rows)
    attention = tensors["attention_mask"].bool()  # (B, P + R)
    input_ids = tensors["input_ids"]
    width = chosen.shape[1]
    packed_index = attention.flatten().cumsum(0).view_as(attention) - 1  # (B, P + R)
    return PackedRows(
        input_ids=input_ids[attention][None].to(device),
        sequences=PackedSequences(attention.sum(1).tolist(), device),
        predictors=(packed_index[:, -width:][chosen] + offset).to(device),
        labels=input_ids[:, -width:][chosen].to(device),
        cells=chosen.flatten().nonzero().flatten().to(device),
        shape=(len(rows), width),
    )
