"""The steps that the scheduler hands to the runner: the tokens of one forward pass."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caldera.rollout.native.blocks import IntArray


@dataclass(frozen=True)
class Prefill:
    """Sequences, or parts of them, to run through the model, packed.

    The tokens before a part are in the cache. A row whose part is not its last is run, but no token
    is sampled for it.
    """

    rows: IntArray  # (B,) of the table, to sample a token for
    token_ids: IntArray  # (T,)
    slots: IntArray  # (T,) where their keys and values are kept
    run: IntArray  # (S,) the rows that are run: one a group of rows with the same prompt
    counts: IntArray  # (S,) tokens of each that are run
    ends: IntArray  # (S,) tokens of each that are in the cache after this step
    tables: IntArray  # (S, pages of the longest)
    leaders: IntArray  # (B,) the place in `run` whose output is each row's
    page_copies: IntArray  # (C, 2) pages to copy afterwards, as (source, target)
    tables_of_rows: IntArray  # (B, as many as any row has had), which captured steps look up

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


# ---- An in-flight step: it was launched, and its tokens may still be on their way from the device


class InFlightStep:
    def __init__(self, step: Step, positions: IntArray, numbers: IntArray, sampled: Tensor) -> None:
        """`positions` and `numbers`: where the tokens belong, in which sequences. `sampled` (2, B):
        tokens as int32, and log-probs as float32 in the same bits; on the device, or in pinned
        memory, to which the device writes them in the step that was launched last."""
        self.step = step
        self.positions = positions
        self.numbers = numbers
        self._sampled = sampled
        self._arrival: torch.cuda.Event | None = None
        if sampled.is_cuda:
            self._sampled = torch.empty(sampled.shape, dtype=sampled.dtype, pin_memory=True)
            self._sampled.copy_(sampled, non_blocking=True)
        if self._sampled.is_pinned():
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def synchronize(self) -> tuple[IntArray, NDArray[np.float32]]:
        """Tokens and their log-probs, (B,) each, once they are there."""
        if self._arrival is not None:
            self._arrival.synchronize()
        sampled: NDArray[np.int32] = self._sampled.numpy()
        tokens, log_probs = (
            sampled[0].astype(np.int64),
            sampled[1].view(np.float32).copy(),
        )
        assert (tokens >= 0).all(), "a step wrote its tokens to another reply"
        return tokens, log_probs

    def abandon(self) -> None:
        """Wait until the device writes no more, whatever becomes of the step."""
        if self._arrival is not None:
            with suppress(RuntimeError):  # the error that led here is the one to report
                self._arrival.synchronize()
