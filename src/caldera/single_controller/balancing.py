"""Load-balanced dispatch: the rows of a batch are spread over the ranks by sequence length.

The controller's batch keeps its order: rows are put into the order of the ranks on their way out,
and outputs back into the order of the batch. For an update, rows are spread within each
mini-batch, so that a mini-batch has the same members for any number of ranks, and the numbers of a
run do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from caldera.protocol import (
    DataProto,
    DataProtoFuture,
    tensors_of,
    unpad_dataproto,
)
from caldera.protocol.balance import balance_partitions, log_seqlen_unbalance


@dataclass(frozen=True)
class Balancing:
    """How a group spreads the rows of a batch. Without it, rows must fill the ranks as they are."""

    by_length: bool = True
    """All ranks get the same work; false: equal shares, in the order of the batch."""
    mini_batch_size: int | None = None
    """Rows of an optimiser step, for methods that are registered with `in_mini_batches`."""
    rows_together: int = 1
    """Consecutive rows that go to the same rank, side by side, such as the pairs of DPO."""

    def partition(
        self, lengths: list[int], ranks: int, in_mini_batches: bool = False
    ) -> list[list[int]]:
        """The rows of each rank, in the order in which it takes them; lengths are in tokens."""
        size = (self.mini_batch_size if in_mini_batches else None) or len(lengths)
        parts: list[list[int]] = [[] for _ in range(ranks)]
        for start in range(0, len(lengths), size):
            shares = self._shares(lengths[start : start + size], ranks)
            for part, rows in zip(parts, shares, strict=True):
                part += [start + row for row in rows]
        return parts

    def spread(self, data: DataProto, ranks: int, in_mini_batches: bool) -> SpreadRows:
        """Which row goes where. Where they do not fill the ranks, the first ones go out twice."""
        lengths = _lengths(data)
        padding = -len(lengths) % (ranks * self.rows_together)
        filled = [lengths[row % len(lengths)] for row in range(len(lengths) + padding)]
        parts = self.partition(filled, ranks, in_mini_batches)
        return SpreadRows(torch.tensor([row for part in parts for row in part]), padding)

    def metrics(self, data: DataProto, ranks: int) -> dict[str, float]:
        """How unequal the work of the ranks is as the rows come, and as they are spread."""
        lengths = _lengths(data)
        return log_seqlen_unbalance(lengths, self.partition(lengths, ranks))

    def _shares(self, lengths: list[int], ranks: int) -> list[list[int]]:
        if self.by_length:
            return balance_partitions(lengths, ranks, self.rows_together)
        share = len(lengths) // ranks
        assert share % self.rows_together == 0, "the ranks are filled with whole groups of rows"
        return [list(range(rank * share, (rank + 1) * share)) for rank in range(ranks)]


@dataclass(frozen=True)
class SpreadRows:
    """The order in which the rows of one batch go to the ranks."""

    order: torch.Tensor
    """Positions in the batch with its padding, those of rank 0 first."""
    padding: int

    def send(self, data: DataProto) -> DataProto:
        """The rows in the order of the ranks."""
        return data.select_idxs(self.order % (len(self.order) - self.padding))

    def restore(self, output: Any) -> Any:
        """The output, or the future of one, in the order of the batch; without rows, as it is."""
        if isinstance(output, DataProtoFuture):
            return replace(output, dispatch_fn=partial(self._restore_after, output.dispatch_fn))
        if not isinstance(output, DataProto) or not len(output):
            return output
        return unpad_dataproto(output.select_idxs(torch.argsort(self.order)), self.padding)

    def _restore_after(
        self, before: Callable[[DataProto], DataProto] | None, output: DataProto
    ) -> Any:
        return self.restore(output if before is None else before(output))


def _lengths(batch: DataProto) -> list[int]:
    """Tokens of each row; rows without a mask count alike."""
    tensors = tensors_of(batch)
    if "attention_mask" not in tensors.keys():  # noqa: SIM118 (a TensorDict has no `in`)
        return [1] * len(batch)
    lengths: list[int] = tensors["attention_mask"].sum(-1).tolist()
    return lengths
