"""Groups of responses: those that answer the same prompt."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from caldera.core_algos.advantages.base import Uids
from caldera.errors import ProtocolError


@dataclass(frozen=True, eq=False)
class Groups:
    ids: Tensor  # (B,): the number of each row's group
    counts: Tensor  # (G,): rows of each group

    @classmethod
    def from_uids(cls, index: Uids, rows: Tensor) -> Groups:
        """Number the distinct uids in order of appearance; `rows` begins with B."""
        uids = index.tolist() if isinstance(index, Tensor) else index  # tensors hash by identity
        if len(uids) != len(rows):
            raise ProtocolError(f"index holds {len(uids)} uids for a batch of {len(rows)}")
        numbers: dict[Hashable, int] = {}
        numbered = [numbers.setdefault(uid, len(numbers)) for uid in uids]
        ids = torch.tensor(numbered, dtype=torch.long, device=rows.device)
        return cls(ids, torch.bincount(ids))

    @property
    def single(self) -> Tensor:
        """(G,): whether a group has one row."""
        return self.counts == 1

    def sum(self, values: Tensor) -> Tensor:
        """(B, ...) -> (G, ...)."""
        zeros = values.new_zeros(len(self.counts), *values.shape[1:])
        return zeros.index_add_(0, self.ids, values)

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.counts

    def std(self, values: Tensor) -> Tensor:
        """The unbiased standard deviation; of a group of one it is 1."""
        squares = self.sum((values - self.mean(values)[self.ids]).square())
        return (squares / (self.counts - 1).clamp(min=1)).sqrt().masked_fill(self.single, 1)

    def first_two(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(G,), (G,): the rows of the largest and of the second largest value of each group.

        A group of one has its one row twice.
        """
        by_value = values.argsort(stable=True)
        order = by_value[self.ids[by_value].argsort(stable=True)]
        last = self.counts.cumsum(0) - 1
        return order[last], order[last - (~self.single).long()]

    def blocks(self, height: int) -> Iterator[Tensor]:
        """The rows of whole groups, as few groups at a time as make `height` rows."""
        order = self.ids.argsort(stable=True)
        start = end = 0
        for count in self.counts.tolist():
            end += count
            if end - start >= height:
                yield order[start:end]
                start = end
        if start < end:
            yield order[start:]
