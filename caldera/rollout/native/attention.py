"""Attention over the paged cache: contexts of `caldera.models.attention` for sampling."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from caldera.models.attention import (
    PADDING_WASTE,
    AttentionLayer,
    PackedSequences,
    flash_attention,
)
from caldera.rollout.native.blocks import PAGE_SIZE, IntArray
from caldera.rollout.native.cache import KVCache


def to_device(array: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


class PagedPrefill:
    """Whole sequences, packed: each attends to itself, and its keys and values are kept."""

    def __init__(self, cache: KVCache, lengths: list[int], slots: IntArray, device: torch.device):
        self.packed = PackedSequences(lengths, device)
        self._cache = cache
        self._slots = to_device(slots, device)  # (T,)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        # under autocast the rotary embedding leaves query and key in float32, unlike the value
        query, key = query.to(value.dtype), key.to(value.dtype)
        self._cache.write(layer.layer_idx, self._slots, key, value)
        return self.packed.attend(layer, query, key, value, scale, window)


class PagedDecode:
    """One new token a sequence: it is kept, and attends to the pages of its sequence.

    Sequences must come ordered by length where `padding_order` says so. On CUDA in half precision
    the kernel takes sequences of any length; elsewhere they are gathered into rectangles.
    """

    def __init__(
        self,
        cache: KVCache,
        tables: IntArray,
        lengths: IntArray,
        slots: IntArray,
        device: torch.device,
    ) -> None:
        self._cache = cache
        self._device = device
        self._tables = tables  # (B, pages of the longest)
        self._lengths = lengths  # (B,) tokens of each sequence, the new one included
        self._slots = to_device(slots, device)  # (B,)
        self._rectangles: list[_Rectangle] | None = None
        self._packed: _PackedKeys | None = None

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        query, key = query.to(value.dtype), key.to(value.dtype)
        number = layer.layer_idx
        self._cache.write(number, self._slots, key, value)
        keys, values = self._cache.keys[number], self._cache.values[number]
        if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            if self._packed is None:
                self._packed = _PackedKeys(self._tables, self._lengths, self._device)
            return self._packed.attend(query, keys, values, scale, window)
        if self._rectangles is None:
            self._rectangles = [
                _Rectangle(self._tables, self._lengths, rows, query)
                for rows in plan_rectangles(self._lengths)
            ]
        parts = [part.attend(query, keys, values, scale, window) for part in self._rectangles]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def padding_order(lengths: IntArray) -> IntArray | None:
    """The order in which sequences of very different lengths waste little padding, if they are."""
    if lengths.max() * len(lengths) <= PADDING_WASTE * lengths.sum():
        return None
    return lengths.argsort(kind="stable")


def plan_rectangles(lengths: IntArray) -> list[slice]:
    """Runs of sequences to gather together: one, or of lengths within a factor of two."""
    if padding_order(lengths) is None:
        return [slice(0, len(lengths))]
    assert (lengths[1:] >= lengths[:-1]).all(), "sequences of different lengths come ordered"
    rows, start = [], 0
    while start < len(lengths):
        # whole pages are gathered, so that less than two pages is no different from two
        limit = 2 * max(int(lengths[start]), PAGE_SIZE)
        stop = int(lengths.searchsorted(limit, side="right"))
        rows.append(slice(start, stop))
        start = stop
    return rows


class _Rectangle:
    """Some sequences' pages, gathered into one rectangle with a mask over its padding."""

    def __init__(self, tables: IntArray, lengths: IntArray, rows: slice, query: Tensor) -> None:
        self._rows = rows
        self._count = rows.stop - rows.start
        width = -(-int(lengths[rows].max()) // PAGE_SIZE)
        self._pages = to_device(tables[rows, :width].ravel(), query.device)
        self._lengths = to_device(lengths[rows], query.device)[:, None]
        self._positions = torch.arange(width * PAGE_SIZE, device=query.device)
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """query (B, Hq, D) of the whole batch; returns (b, Hq, D) of these rows."""
        heads, head_dim = keys.shape[2:]
        gathered = [
            pages.index_select(0, self._pages)
            .view(self._count, -1, heads, head_dim)
            .transpose(1, 2)
            for pages in (keys, values)
        ]  # (b, Hkv, L, D)
        # the query heads that share a key head take the place of query positions
        grouped = query[self._rows].reshape(self._count, heads, -1, head_dim)  # (b, Hkv, G, D)
        mask = self._mask(window, query.dtype)
        out = F.scaled_dot_product_attention(
            grouped, gathered[0], gathered[1], attn_mask=mask, scale=scale
        )
        return out.reshape(self._count, -1, head_dim)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, (b, 1, 1, L): 0 where a token is seen."""
        if window not in self._masks:
            unseen = self._positions >= self._lengths
            if window is not None:
                unseen |= self._positions < self._lengths - window
            mask = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device)
            self._masks[window] = mask.masked_fill_(unseen, float("-inf"))[:, None, None]
        return self._masks[window]


class _PackedKeys:
    """The sequences' tokens, gathered end to end for PyTorch's variable-length flash kernel."""

    def __init__(self, tables: IntArray, lengths: IntArray, device: torch.device) -> None:
        count = len(lengths)
        self._lengths = to_device(lengths, device)
        self._longest = int(lengths.max())
        self._queries = torch.arange(count + 1, dtype=torch.int32, device=device)
        self._cumulative = F.pad(self._lengths.cumsum(0), (1, 0)).to(torch.int32)  # (B + 1,)
        positions = torch.arange(self._longest, device=device)
        pages = to_device(tables, device)[:, positions // PAGE_SIZE]  # (B, longest)
        slots = pages * PAGE_SIZE + positions % PAGE_SIZE
        kept = positions < self._lengths[:, None]
        flat = torch.nonzero_static(kept.flatten(), size=int(lengths.sum())).flatten()
        self._slots = slots.flatten().index_select(0, flat)  # (sum of lengths,)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        key, value = (
            pages.view(-1, *pages.shape[2:]).index_select(0, self._slots)
            for pages in (keys, values)
        )
        return flash_attention(
            query, key, value, self._queries, self._cumulative, 1, self._longest, scale, window
        )
