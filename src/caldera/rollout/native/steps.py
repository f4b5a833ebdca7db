"""What the scheduler hands to the runner: the tokens of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from caldera.rollout.native.blocks import IntArray


@dataclass(frozen=True)
class Prefill:
    """Sequences, or parts of them, to run through the model, packed.

    What comes before a part is in the cache. A row whose part is not its last is run, but no token
    is sampled for it.
    """

    rows: IntArray  # (B,) of the table, to sample a token for
    token_ids: IntArray  # (T,)
    slots: IntArray  # (T,) where their keys and values are kept
    run: IntArray  # (S,) the rows that are run: one a group of rows with the same prompt
    counts: IntArray  # (S,) tokens of each that are run
    ends: IntArray  # (S,) tokens of each that are in the cache after this step
    tables: IntArray  # (S, pages of the longest)
    leaders: IntArray  # (B,) which of those that are run was run for each row
    page_copies: IntArray  # (C, 2) pages to copy afterwards, as (source, target)
    tables_of_rows: IntArray  # (B, as many as any row has had), which recorded steps look up

    @property
    def is_whole(self) -> bool:
        """Whether nothing comes before what is run."""
        return bool((self.ends == self.counts).all())

    @property
    def positions(self) -> IntArray:
        """(T,) of the tokens in their sequences."""
        before = np.cumsum(self.counts) - self.ends
        return np.arange(len(self.token_ids)) - np.repeat(before, self.counts)


@dataclass(frozen=True)
class Decode:
    """The newest token of every running sequence."""

    rows: IntArray  # (B,)
    token_ids: IntArray  # (B,)
    slots: IntArray  # (B,)
    ends: IntArray  # (B,) tokens of each sequence, this one included
    tables: IntArray  # (B, pages of the longest)

    is_whole: ClassVar[bool] = False

    @property
    def run(self) -> IntArray:
        return self.rows

    @property
    def counts(self) -> IntArray:
        return np.ones_like(self.ends)

    @property
    def positions(self) -> IntArray:
        return self.ends - 1


Step = Prefill | Decode
