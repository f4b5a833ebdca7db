"""Attention over the paged cache on a CPU, by compiled kernels: the same for every kind of step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from caldera.models.attention import AttentionLayer
from caldera.rollout.native.cache import KVCache
from caldera.rollout.native.cpu.kernels import (
    CpuKernels,
    LayerArguments,
    Matrices,
    StepArguments,
)
from caldera.rollout.native.layers import AttentionParts
from caldera.rollout.native.steps import Step

MOST_OF_A_PART = 4
"""Tokens of a sequence that are taken together."""
FEW_POSITIONS = 256
"""That a step looks at, for which one thread is enough."""


class CompiledAttention:
    """The tokens of a step: each is kept, and attends to the pages of its sequence."""

    def __init__(self, kernels: CpuKernels, cache: KVCache, step: Step) -> None:
        self._kernels = kernels
        self._cache = cache
        counts, ends, tables = step.counts, step.ends, step.tables
        pieces = -(-counts // MOST_OF_A_PART)
        owner = np.repeat(np.arange(len(counts)), pieces)  # (P,) of each part
        done = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        done *= MOST_OF_A_PART  # tokens of the sequence that come before, in this step
        first = (np.cumsum(counts) - counts)[owner] + done
        count = np.minimum(counts[owner] - done, MOST_OF_A_PART)
        place = (ends - counts)[owner] + done
        arrays = (step.slots, first, count, place, owner, tables)
        self._arrays = [np.ascontiguousarray(array, dtype=np.int64) for array in arrays]
        seen = int((counts * ends).sum())
        threads = 1 if seen < FEW_POSITIONS else torch.get_num_threads()
        self._step = StepArguments(
            len(step.slots),
            len(owner),
            tables.shape[1],
            threads,
            *(array.ctypes.data for array in self._arrays),
        )

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = AttentionParts(layer.module.layer_idx, layer.scale, layer.window)
        return self.turn_and_attend(parts, (_dense(query), _dense(key), _dense(value)), None)

    def turn_and_attend(
        self,
        parts: AttentionParts,
        heads: tuple[Tensor, Tensor, Tensor],
        turn: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Of the layer's queries, keys and values (T, H, D), the cells of a token dense.

        With `turn`, cosines and sines (T, D), the queries and keys that are given are changed:
        normed, if the layer does that, and rotated.
        """
        out = heads[0].new_empty(heads[0].shape)
        self._kernels.attend(self._step, self._layer(parts, heads, turn, out))
        return out

    def run_layer(
        self,
        parts: AttentionParts,
        heads: tuple[Tensor, Tensor, Tensor],
        turn: tuple[Tensor, Tensor],
        matrices: Matrices,
    ) -> None:
        """All that a layer of small matrices does with the values that these point to; `heads` are
        room for its queries, keys and values."""
        out = heads[0].new_empty(heads[0].shape)
        self._kernels.run_layer(self._step, self._layer(parts, heads, turn, out), matrices)

    def _layer(
        self,
        parts: AttentionParts,
        heads: tuple[Tensor, Tensor, Tensor],
        turn: tuple[Tensor, Tensor] | None,
        out: Tensor,
    ) -> LayerArguments:
        query, key, value = heads
        number, norms = parts.number, parts.norms
        self._cache.check(number, key, value)
        cos, sin = (each.data_ptr() for each in turn) if turn else (None, None)
        return LayerArguments(
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            query.stride(0),
            key.stride(0),
            value.stride(0),
            cos,
            sin,
            norms.query.data_ptr() if norms else None,
            norms.key.data_ptr() if norms else None,
            self._cache.keys[number].data_ptr(),
            self._cache.values[number].data_ptr(),
            out.data_ptr(),
            query.shape[1],
            key.shape[1],
            parts.window or 0,
            parts.scale,
            norms.epsilon if norms else 0.0,
        )


def _dense(heads: Tensor) -> Tensor:
    """heads (T, H, D), of which those of a token lie behind each other."""
    heads = heads.float()
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()
