"""Decode steps on CUDA: recorded once for each of some sizes, then replayed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caldera.errors import UnsupportedError
from caldera.models.attention import AttentionLayer
from caldera.models.exact_mode import in_exactness
from caldera.rollout.native.blocks import PAGE_SIZE, pages_for
from caldera.rollout.native.cache import KVCache
from caldera.rollout.native.sampler import SamplingRows, draws

# ---- What host and device tell each other of a recorded step, in memory that both of them reach
#
# A copy before and one after each step would keep the GPU waiting, for longer than a small kernel
# takes. So the first kernel of a step reads its inputs from the host's memory, and the last one
# writes there what was chosen. A recorded step always looks in the same place: which of some
# letters is its own, a number on the device says, which each step moves on.

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


class Chosen(NamedTuple):
    logits: Tensor  # (B, V)
    told: Tensor  # (2, B) tokens, and log-probs in the same bits, on the device
    answer: Tensor  # the same in the host's memory, when the step has ended


class DeviceState:
    """What lies on the device between steps, where recorded steps look for it."""

    def __init__(self, rows: int, longest: int, layers: int, device: torch.device) -> None:
        """`rows` sequences run at a time, each of at most so many tokens."""
        # The last row is of places that no sequence needs.
        self.newest = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        width = pages_for(longest)
        self.tables = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        self.pointers = torch.zeros(layers, 2, dtype=torch.int64, device=device)
        self.mail = Mail(rows, device)
        self._known: weakref.ref[KVCache] | None = None  # as long as it is, with so many pages
        self._known_pages = 0

    def find(self, cache: KVCache) -> None:
        """Note where the pages of each layer begin."""
        if self._known is not None and self._known() is cache and cache.pages == self._known_pages:
            return
        self._known, self._known_pages = weakref.ref(cache), cache.pages
        pairs = zip(cache.keys, cache.values, strict=True)
        addresses = [(keys.data_ptr(), values.data_ptr()) for keys, values in pairs]
        self.pointers.copy_(torch.tensor(addresses).pin_memory(), non_blocking=True)


class RecordedDecode:
    """Attention of one new token a place, for recording: everything is read from memory."""

    def __init__(self, state: DeviceState, inputs: Tensor) -> None:
        self._state = state
        self._inputs = inputs  # (5, B)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        from caldera.rollout.native.cuda.attention_kernels import Pages, attend_pages, keep

        inputs, tables = self._inputs, self._state.tables
        pointers = self._state.pointers[layer.layer_idx]
        pages = Pages(pointers, inputs, tables)
        query, key = query.to(value.dtype), key.to(value.dtype)
        if not in_exactness():
            return attend_pages(query, key, value, pages, scale, window)
        from caldera.models.exact_cuda import attend

        keep(key, value, pages)
        paged = (pointers, tables, inputs[0], PAGE_SIZE)
        return attend(query, key, None, inputs[1], scale, window, paged)


class DecodeGraphs:
    """Replays `body`, which runs a step whose inputs (5, B) it lays where it is told to."""

    def __init__(
        self,
        body: Callable[[Tensor], tuple[Tensor, Tensor]],
        sizes: Sequence[int],
        state: DeviceState,
    ) -> None:
        """`body` returns logits (B, V) and what was chosen, (2, B)."""
        self._body = body
        self._sizes = sorted(sizes)
        self._state = state
        self._inputs = state.tables.new_zeros(INPUTS * self._sizes[-1])
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._pool: Any = None  # memory that the recordings share

    def run(self, inputs: NDArray[np.int32]) -> Chosen:
        """A step of the inputs (5, B); what it returns on the device lasts until the next."""
        count = inputs.shape[1]
        size = next(size for size in self._sizes if size >= count)
        if size not in self._recorded:
            self._recorded[size] = self._record(size)
        graph, logits, told = self._recorded[size]
        mail = self._state.mail
        mail.send(inputs, size)
        graph.replay()
        return Chosen(logits[:count], told[:, :count], mail.answer(size)[:, :count])

    def _record(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        inputs = self._inputs[: INPUTS * size].view(INPUTS, size)
        nothing = np.zeros((INPUTS, 0), dtype=np.int32)
        self._state.mail.send(nothing, size)
        self._body(inputs)  # what is made when it first runs must not be recorded
        torch.cuda.synchronize(inputs.device)
        graph = torch.cuda.CUDAGraph()
        try:  # other threads may be busy with other things on the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits, told = self._body(inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # such as a model that looks at positions on the host
            raise UnsupportedError(
                f"a step of this model cannot be recorded ({error}): "
                "set actor_rollout_ref.rollout.enforce_eager=True"
            ) from error
        self._pool = graph.pool()
        return graph, logits, told


def ladder(largest: int) -> list[int]:
    """Sizes to record steps of: each not much larger than the one before."""
    sizes = [4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256]
    step = 64
    while sizes[-1] < largest:
        if sizes[-1] >= 8 * step:
            step *= 2
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < largest] + [largest]


def step_inputs(
    rows: NDArray[np.int64],
    positions: NDArray[np.int64],
    slots: NDArray[np.int64],
    sampling: SamplingRows | None,
) -> NDArray[np.int32]:
    """What a step is told, (5, B). Without `sampling`, what is chosen does not matter."""
    told = np.zeros((INPUTS, len(rows)), dtype=np.int32)
    told[0], told[1], told[2] = rows, positions, slots // PAGE_SIZE
    if sampling is not None:
        told[3] = draws(sampling.seed, sampling.generated).view(np.int32)
        temperature = sampling.temperature
        inverse = np.divide(1, temperature, np.zeros(len(rows)), where=temperature != 0)
        told[4] = inverse.astype(np.float32).view(np.int32)
    return told
