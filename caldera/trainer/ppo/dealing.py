"""Dealing the rows of a batch to ranks, without the controller's batch changing its order.

Rows are dealt so that all ranks have the same work. For an update they are dealt within each
mini-batch, so that a mini-batch has the same members for any number of ranks, and the numbers of a
run do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch

from caldera.data import balance_partitions, log_seqlen_unbalance
from caldera.protocol import DataProto, pad_dataproto_to_divisor, tensors_of, unpad_dataproto
from caldera.single_controller import WorkerGroup


def deal(
    lengths: list[int],
    ranks: int,
    balance: bool,
    mini_batch_size: int | None = None,
    rows_together: int = 1,
) -> list[list[int]]:
    """The rows of each rank, in the order in which it takes them; lengths are in tokens.

    Each `rows_together` consecutive rows go to the same rank, side by side.
    """
    size = mini_batch_size or len(lengths)
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(lengths), size):
        block = lengths[start : start + size]
        if balance:
            shares = balance_partitions(block, ranks, rows_together)
        else:
            share = len(block) // ranks
            assert share % rows_together == 0, "whoever fills the ranks fills them with groups"
            shares = [list(range(r * share, (r + 1) * share)) for r in range(ranks)]
        for part, rows in zip(parts, shares, strict=True):
            part += [start + row for row in rows]
    return parts


class DealtGroup:
    """A worker group whose calls with a batch deal its rows to the ranks.

    What comes back has the batch's order, so that the control flow above cannot tell how many ranks
    there are. Rows that do not fill the ranks are made up by repeating the first ones.
    """

    def __init__(
        self,
        group: WorkerGroup,
        balance: bool,
        mini_batch_sizes: dict[str, int],
        rows_together: int = 1,
    ) -> None:
        """`mini_batch_sizes`: samples of an optimiser step, by the method that makes them.
        `rows_together`: consecutive rows that no two ranks may have."""
        self._group = group
        self._balance = balance
        self._mini_batch_sizes = mini_batch_sizes
        self._rows_together = rows_together
        self.world_size = group.world_size

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._group, name)
        if self.world_size == 1:
            return cast(Callable[..., Any], method)
        return partial(self._call, name, method)

    def metrics(self, batch: DataProto) -> dict[str, float]:
        """How unequal the ranks' work would be as the rows come, and is as they are dealt."""
        if self.world_size == 1:
            return {}
        lengths = _lengths(batch)
        ranks = self._group.parts(next(iter(self._mini_batch_sizes), ""))
        parts = deal(lengths, ranks, self._balance, rows_together=self._rows_together)
        return log_seqlen_unbalance(lengths, parts)

    def _call(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        if not args or not isinstance(args[0], DataProto):
            return method(*args)
        ranks = self._group.parts(name)  # that have rows of their own
        filled, extra = pad_dataproto_to_divisor(args[0], ranks * self._rows_together)
        size = self._mini_batch_sizes.get(name)
        parts = deal(_lengths(filled), ranks, self._balance, size, self._rows_together)
        filled = self._group.needed_by(name, filled)
        order = torch.tensor([row for part in parts for row in part])
        answer = method(filled.select_idxs(order), *args[1:])
        if not isinstance(answer, DataProto) or not len(answer):
            return answer
        return unpad_dataproto(answer.select_idxs(torch.argsort(order)), extra)


def _lengths(batch: DataProto) -> list[int]:
    lengths: list[int] = tensors_of(batch)["attention_mask"].sum(-1).tolist()
    return lengths
