"""What host and device tell each other of a recorded step, in memory that both of them reach.

A copy before and one after each step would keep the GPU waiting, for longer than a small kernel
takes. So the first kernel of a step reads its inputs from the host's memory, and the last one
writes there what was chosen. A recorded step always looks in the same place: which of some letters
is its own, a number on the device says, which each step moves on.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

INPUTS = 5
"""Rows, positions, pages, random numbers, temperatures: what a step is told of each place."""
FIELDS = 8
"""Numbers of a letter for each place, 32 bytes: the inputs come first, the rest is not used."""
LETTERS = 8
"""Steps that may be under way are far fewer: no letter is written to that is still to be read."""
UNANSWERED = -1
"""Where a token is to be: a step that read another letter answers elsewhere."""


class Mail:
    def __init__(self, places: int, device: torch.device) -> None:
        """A step has at most so many places, each for one of as many rows; those that no sequence
        needs have the row behind these."""
        self._spare_row = places
        self.letters = _shared(places * FIELDS, device)
        self.answers = _shared(places * 2, device)
        self.next_letter = torch.zeros(1, dtype=torch.int32, device=device)
        """Which one the device reads for its next step; `_next` is what the host writes next."""
        self._written: NDArray[np.int32] = self.letters.numpy()
        self._answered: NDArray[np.int32] = self.answers.numpy()
        self._next = 0
        self._last_sent = 0

    def send(self, inputs: NDArray[np.int32], size: int) -> None:
        """Tell a step of so many places its inputs (5, B); the places behind them change nothing.

        To be called once for each step that is run.
        """
        self._last_sent, self._next = self._next, (self._next + 1) % LETTERS
        letter = self._written[self._last_sent, : size * FIELDS].reshape(size, FIELDS)
        count = inputs.shape[1]
        letter[:count, :INPUTS] = inputs.T
        letter[count:, :INPUTS] = (self._spare_row, -1, 0, 0, 0)
        self._answered[self._last_sent, :count] = UNANSWERED

    def answer(self, size: int) -> Tensor:
        """What the newest step of so many places chooses, (2, B), once it has ended: tokens, and
        log-probs in the same bits. Other steps write to it a few steps later."""
        return self.answers[self._last_sent, : 2 * size].view(2, size)

    def align(self) -> None:
        """Let the device read the next letter that is sent, whatever became of those before."""
        self.next_letter.fill_(self._next)


def _shared(size: int, device: torch.device) -> Tensor:
    """Memory of the host that the device reaches, (LETTERS, size)."""
    return torch.zeros(LETTERS, size, dtype=torch.int32, pin_memory=device.type == "cuda")
