"""Decode steps as CUDA graphs: captured once for each of some batch sizes, then replayed."""

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
from caldera.models.exact_norm import in_exactness
from caldera.rollout.native.blocks import PAGE_SIZE, pages_for
from caldera.rollout.native.cache import KVCache
from caldera.rollout.native.sampler import SamplingRows, draws

# ---- The host mailbox of captured steps: pinned memory, mapped into the device (zero copy)
#
# A copy before and one after each step would keep the GPU waiting, for longer than a small kernel
# takes. So the first kernel of a step reads its inputs from the host's memory, and the last one
# writes there what was chosen. A captured step always reads the same addresses: a counter on the
# device, which each step increments, selects its message among those of the mailbox.

INPUTS = 5
"""Rows, positions, pages, random numbers, temperatures: the inputs of a step for each place."""
FIELDS = 8
"""Numbers of a message for each place, 32 bytes: the inputs come first, the rest is not used."""
MESSAGES = 8
"""Steps that may be under way are far fewer: no message is written to that is still to be read."""
NOT_WRITTEN = -1
"""In place of a token that is not written: a step that read another message replies elsewhere."""


class HostMailbox:
    def __init__(self, places: int, device: torch.device) -> None:
        """A step has at most so many places, each for one of as many rows; unused places
        needs have the row behind these."""
        self._spare_row = places
        self.messages = _shared(places * FIELDS, device)
        self.replies = _shared(places * 2, device)
        self.next_message = torch.zeros(1, dtype=torch.int32, device=device)
        """Which one the device reads for its next step; `_next` is what the host writes next."""
        self._written: NDArray[np.int32] = self.messages.numpy()
        self._replied: NDArray[np.int32] = self.replies.numpy()
        self._next = 0
        self._last_sent = 0

    def send(self, inputs: NDArray[np.int32], size: int) -> None:
        """Write the inputs (5, B) of a step of so many places; those behind them change nothing.

        To be called once for each step that is run.
        """
        self._last_sent, self._next = self._next, (self._next + 1) % MESSAGES
        message = self._written[self._last_sent, : size * FIELDS].reshape(size, FIELDS)
        count = inputs.shape[1]
        message[:count, :INPUTS] = inputs.T
        message[count:, :INPUTS] = (self._spare_row, -1, 0, 0, 0)
        self._replied[self._last_sent, :count] = NOT_WRITTEN

    def reply(self, size: int) -> Tensor:
        """The output of the newest step of so many places, (2, B), once it has ended: tokens, and
        log-probs in the same bits. Other steps write to it a few steps later."""
        return self.replies[self._last_sent, : 2 * size].view(2, size)

    def align(self) -> None:
        """Let the device read the next message that is sent, whatever became of those before."""
        self.next_message.fill_(self._next)


def _shared(size: int, device: torch.device) -> Tensor:
    """Memory of the host that the device reaches, (MESSAGES, size)."""
    return torch.zeros(MESSAGES, size, dtype=torch.int32, pin_memory=device.type == "cuda")


class Chosen(NamedTuple):
    logits: Tensor  # (B, V)
    token_log_probs: Tensor  # (2, B) tokens, and log-probs in the same bits, on the device
    reply: Tensor  # the same in the host's memory, when the step has ended


class DeviceState:
    """The tensors that captured steps read on the device."""

    def __init__(self, rows: int, longest: int, layers: int, device: torch.device) -> None:
        """`rows` sequences run at a time, each of at most so many tokens."""
        # The last row is of places that no sequence needs.
        self.newest = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        width = pages_for(longest)
        self.tables = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        self.pointers = torch.zeros(layers, 2, dtype=torch.int64, device=device)
        self.mailbox = HostMailbox(rows, device)
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


class CapturedDecode:
    """Attention of one new token a place, for capture: everything is read from memory."""

    def __init__(self, state: DeviceState, inputs: Tensor) -> None:
        self._state = state
        self._inputs = inputs  # (5, B)

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from caldera.rollout.native.cuda.attention_kernels import Pages, attend_pages, keep

        inputs, tables = self._inputs, self._state.tables
        pointers = self._state.pointers[layer.module.layer_idx]
        pages = Pages(pointers, inputs, tables)
        query, key = query.to(value.dtype), key.to(value.dtype)
        if not in_exactness():
            return attend_pages(query, key, value, pages, layer.scale, layer.window)
        from caldera.models.exact_cuda import attend

        keep(key, value, pages)
        paged = (pointers, tables, inputs[0], PAGE_SIZE)
        return attend(query, key, None, inputs[1], layer.scale, layer.window, paged)


class DecodeGraphs:
    """Captures and replays `body`: a step that copies its inputs (5, B) to the given tensor."""

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
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._pool: Any = None  # memory that the graphs share

    def run(self, inputs: NDArray[np.int32]) -> Chosen:
        """A step of the inputs (5, B); what it returns on the device lasts until the next."""
        count = inputs.shape[1]
        size = next(size for size in self._sizes if size >= count)
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        graph, logits, token_log_probs = self._captured[size]
        mailbox = self._state.mailbox
        mailbox.send(inputs, size)
        graph.replay()
        return Chosen(logits[:count], token_log_probs[:, :count], mailbox.reply(size)[:, :count])

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        inputs = self._inputs[: INPUTS * size].view(INPUTS, size)
        nothing = np.zeros((INPUTS, 0), dtype=np.int32)
        self._state.mailbox.send(nothing, size)
        self._body(inputs)  # what is made when it first runs must not be captured
        torch.cuda.synchronize(inputs.device)
        graph = torch.cuda.CUDAGraph()
        try:  # other threads may be busy with other things on the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits, token_log_probs = self._body(inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # such as a model that looks at positions on the host
            raise UnsupportedError(
                f"CUDA graph capture failed ({error}): "
                "set actor_rollout_ref.rollout.enforce_eager=True"
            ) from error
        self._pool = graph.pool()
        return graph, logits, token_log_probs


def capture_sizes(largest: int) -> list[int]:
    """Batch sizes to capture graphs for: each not much larger than the one before."""
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
    """The inputs of a step, (5, B). Without `sampling`, what is chosen does not matter."""
    inputs = np.zeros((INPUTS, len(rows)), dtype=np.int32)
    inputs[0], inputs[1], inputs[2] = rows, positions, slots // PAGE_SIZE
    if sampling is not None:
        inputs[3] = draws(sampling.seed, sampling.generated).view(np.int32)
        temperature = sampling.temperature
        inverse = np.divide(1, temperature, np.zeros(len(rows)), where=temperature != 0)
        inputs[4] = inverse.astype(np.float32).view(np.int32)
    return inputs
