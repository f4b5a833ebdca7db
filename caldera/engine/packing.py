"""From padded rows to packed tokens, and back: padding exists on neither side of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from caldera.models.attention import PackedSequences
from caldera.protocol import DataProto, tensors_of


@dataclass(frozen=True)
class PackedRows:
    """The tokens of some rows end to end, and where their response tokens are.

    N is the number of response tokens that the loss can see (response_mask 1).
    """

    input_ids: Tensor  # (1, T)
    sequences: PackedSequences
    predictors: Tensor  # (N,) packed index of the token before each response token
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
    attention = tensors["attention_mask"].bool()  # (B, P + R)
    input_ids = tensors["input_ids"]
    response_mask = tensors["response_mask"].bool()  # (B, R)
    width = response_mask.shape[1]
    lengths = attention.sum(1).tolist()
    packed_index = attention.flatten().cumsum(0).view_as(attention) - 1  # (B, P + R)
    chosen = response_mask & attention[:, -width:]
    return PackedRows(
        input_ids=input_ids[attention][None].to(device),
        sequences=PackedSequences(lengths, device),
        predictors=(packed_index[:, -width:][chosen] - 1).to(device),
        labels=input_ids[:, -width:][chosen].to(device),
        cells=chosen.flatten().nonzero().flatten().to(device),
        shape=(len(rows), width),
    )
