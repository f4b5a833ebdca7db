"""What the scheduler hands to the runner: the tokens of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from caldera.rollout.native.blocks import IntArray


@dataclass(frozen=True)
class Prefill:
    """Whole sequences to run through the model, packed."""

    rows: IntArray  # (B,) of the table, to sample a token for
    token_ids: IntArray  # (T,)
    slots: IntArray  # (T,) where their keys and values are kept
    lengths: list[int]  # of the sequences that are run: one a group of rows with the same prompt
    run: IntArray  # (S,) their rows
    leaders: IntArray  # (B,) which of these was run for each row
    page_copies: IntArray  # (C, 2) pages to copy afterwards, as (source, target)
    tables_of_rows: IntArray  # (B, pages of the longest)

    @property
    def prefilled(self) -> IntArray:
        """Rows of which more than one token is run."""
        return self.run

    @property
    def positions(self) -> IntArray:
        """(T,) of the tokens in their sequences."""
        return np.concatenate([np.arange(length) for length in self.lengths])


@dataclass(frozen=True)
class Chunks(Prefill):
    """Parts of sequences, packed; what comes before each is in the cache. `lengths` are theirs.

    A row whose part is not its last is run, but no token is sampled for it.
    """

    places: IntArray  # (T,) the positions of the tokens
    ends: IntArray  # (S,) tokens of each sequence that are in the cache after this step
    tables: IntArray  # (S, pages of the longest)

    @property
    def prefilled(self) -> IntArray:
        return self.run[np.array(self.lengths) > 1]

    @property
    def positions(self) -> IntArray:
        return self.places


@dataclass(frozen=True)
class Decode:
    """The newest token of every running sequence."""

    rows: IntArray  # (B,)
    token_ids: IntArray  # (B,)
    slots: IntArray  # (B,)
    lengths: IntArray  # (B,) tokens of each sequence, this one included
    tables: IntArray  # (B, pages of the longest)

    @property
    def positions(self) -> IntArray:
        return self.lengths - 1


Step = Prefill | Decode
