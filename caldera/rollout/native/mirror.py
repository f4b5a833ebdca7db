"""Keys and values of sequences that are decoded together, laid out as products take them.

On a CPU, gathering the pages of all sequences in every layer of every step takes longer than
attending to them. So they are gathered once, and grow by a token a step until other sequences are
to be decoded.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from caldera.models.attention import AttentionLayer
from caldera.rollout.native.attention import plan_rectangles
from caldera.rollout.native.blocks import PAGE_SIZE, IntArray, pages_for
from caldera.rollout.native.cache import KVCache
from caldera.rollout.native.steps import Decode

ROOM = 64
"""Tokens by which sequences may grow before they are gathered again."""
MOST_BYTES = 2**30
"""That are laid out beside the cache; larger batches are gathered in every step."""


class Mirror:
    """What the sequences of a decode step have in the cache, and will have after the next ones."""

    def __init__(self, step: Decode) -> None:
        self._rows = step.rows
        self._lengths = step.lengths
        self._rectangles = [_GrowingRectangle(step, rows) for rows in plan_rectangles(step.lengths)]

    def tokens(self) -> int:
        """For how many there is room."""
        return sum(each.cells for each in self._rectangles)

    def take(self, step: Decode) -> bool:
        """Go on to the next step; False if it is not that of the same sequences, or has no room."""
        is_next = np.array_equal(step.rows, self._rows)
        is_next = is_next and np.array_equal(step.lengths, self._lengths + 1)
        if not is_next or not all(each.take(step.lengths) for each in self._rectangles):
            return False
        self._lengths = step.lengths
        return True

    def attend(
        self, number: int, cache: KVCache, new: tuple[Tensor, Tensor, Tensor], scale: float,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        """Of the layer's new queries, keys and values (B, H, D); returns (B, Hq, D)."""
        parts = [each.attend(number, cache, new, scale, window) for each in self._rectangles]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class MirroredDecode:
    """One new token a sequence, which is kept in the cache and in the mirror."""

    def __init__(self, mirror: Mirror, cache: KVCache, slots: IntArray) -> None:
        self._mirror = mirror
        self._cache = cache
        self._slots = torch.from_numpy(slots)  # (B,)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        number = layer.layer_idx
        self._cache.write(number, self._slots, key, value)
        return self._mirror.attend(number, self._cache, (query, key, value), scale, window)


class _GrowingRectangle:
    """Some sequences, padded to the same length and with room behind it."""

    def __init__(self, step: Decode, rows: slice) -> None:
        self._rows = rows
        self._count = rows.stop - rows.start  # b
        lengths = step.lengths[rows]
        pages = pages_for(int(lengths.max()))
        self._pages = torch.from_numpy(step.tables[rows, :pages].ravel())
        self._capacity = pages * PAGE_SIZE + ROOM  # C
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values, (b, Hkv, C, D)
        self._set(lengths)

    @property
    def cells(self) -> int:
        cells: int = self._count * self._capacity
        return cells

    def take(self, lengths: IntArray) -> bool:
        if lengths[self._rows].max() > self._capacity:
            return False
        self._set(lengths[self._rows])
        return True

    def _set(self, lengths: IntArray) -> None:
        self._width = int(lengths.max())  # L
        self._last = torch.from_numpy(lengths - 1)
        self._masks: dict[int | None, Tensor] = {}
        self._new: Tensor | None = None

    def _cells_of_new(self, heads: int) -> Tensor:
        """Where the new token of each sequence and head is kept, (b * Hkv,)."""
        if self._new is None:
            first = self._capacity * torch.arange(self._count * heads).view(-1, heads)
            self._new = (first + self._last[:, None]).flatten()
        return self._new

    def attend(
        self, number: int, cache: KVCache, new: tuple[Tensor, Tensor, Tensor], scale: float,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        query, *pair = (each[self._rows] for each in new)
        held = self._layers.get(number)
        if held is None:
            held = self._layers[number] = (
                self._gathered(cache.keys[number]), self._gathered(cache.values[number]),
            )  # fmt: skip
        else:
            cells = self._cells_of_new(pair[0].shape[1])
            for kept, fresh in zip(held, pair, strict=True):
                kept.view(-1, kept.shape[-1]).index_copy_(0, cells, fresh.flatten(0, 1))
        heads, width = pair[0].shape[1:]
        keys, values = (each.flatten(0, 1)[:, : self._width] for each in held)  # (b * Hkv, L, D)
        # the query heads that share a key head take the place of query positions
        grouped = query.reshape(self._count * heads, -1, width)  # (b * Hkv, G, D)
        mask = self._mask(window, heads, query)
        if query.dtype != torch.float32:  # in which alone products round no more than they must
            found = F.scaled_dot_product_attention(grouped, keys, values, mask, scale=scale)
        else:
            scores = torch.baddbmm(mask, grouped, keys.mT, alpha=scale)  # (b * Hkv, G, L)
            found = torch.bmm(scores.softmax(-1), values)
        return found.view(self._count, -1, width)

    def _gathered(self, pages: Tensor) -> Tensor:
        """Pages (pages, tokens, Hkv, D) of these sequences."""
        heads, width = pages.shape[2:]
        found = pages.index_select(0, self._pages).view(self._count, -1, heads, width)
        out = found.new_zeros(self._count, heads, self._capacity, width)
        out[:, :, : found.shape[1]] = found.transpose(1, 2)
        return out

    def _mask(self, window: int | None, heads: int, query: Tensor) -> Tensor:
        """What is added to the scores, (b * Hkv, 1, L): 0 where a token is seen."""
        if window not in self._masks:
            place, last = torch.arange(self._width), self._last[:, None]
            unseen = place > last
            if window is not None:
                unseen |= place <= last - window
            mask = torch.zeros(unseen.shape, dtype=query.dtype).masked_fill_(unseen, float("-inf"))
            self._masks[window] = mask.repeat_interleave(heads, 0)[:, None]
        return self._masks[window]
