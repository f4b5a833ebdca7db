"""A step that was begun, and whose tokens may still be on their way from the device."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caldera.rollout.native.blocks import IntArray
from caldera.rollout.native.steps import Step


class Flight:
    def __init__(self, step: Step, positions: IntArray, numbers: IntArray, told: Tensor) -> None:
        """`positions` and `numbers`: where the tokens belong, in which sequences. `told` (2, B):
        tokens as int32, and log-probs as float32 in the same bits; on the device, or in pinned
        memory, to which the device writes them in the step that was begun last."""
        self.step = step
        self.positions = positions
        self.numbers = numbers
        self._told = told
        self._arrival: torch.cuda.Event | None = None
        if told.is_cuda:
            self._told = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
            self._told.copy_(told, non_blocking=True)
        if self._told.is_pinned():
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def land(self) -> tuple[IntArray, NDArray[np.float32]]:
        """Tokens and their log-probs, (B,) each, once they are there."""
        if self._arrival is not None:
            self._arrival.synchronize()
        told: NDArray[np.int32] = self._told.numpy()
        tokens, log_probs = told[0].astype(np.int64), told[1].view(np.float32).copy()
        assert (tokens >= 0).all(), "a step told its tokens to another"
        return tokens, log_probs

    def abandon(self) -> None:
        """Wait until the device writes no more, whatever becomes of the step."""
        if self._arrival is not None:
            with suppress(RuntimeError):  # the error that led here is the one to be told
                self._arrival.synchronize()
