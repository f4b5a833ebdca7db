"""Attention over the paged cache: contexts of `caldera.models.attention` for sampling."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from caldera.models.attention import (
    PADDING_WASTE,
    AttentionLayer,
    PackedSequences,
    flash_attention,
)
from caldera.models.exact_mode import in_exactness
from caldera.models.transfer import send
from caldera.rollout.native.blocks import PAGE_SIZE, IntArray
from caldera.rollout.native.cache import KVCache


def to_device(array: NDArray[np.integer], device: torch.device) -> Tensor:
    return send(torch.from_numpy(array), device)


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


class PagedChunks:
    """Parts of sequences, packed: they are kept, and each attends to its sequence up to itself.

    On CUDA in half precision the kernel takes them as they come; elsewhere parts of similar size
    are gathered into rectangles.
    """

    def __init__(
        self,
        cache: KVCache,
        tables: IntArray,
        counts: IntArray,
        ends: IntArray,
        slots: IntArray,
        device: torch.device,
    ) -> None:
        self._cache = cache
        self._device = device
        self._tables = tables  # (S, pages of the longest)
        self._counts = counts  # (S,) tokens of each part
        self._ends = ends  # (S,) tokens of each sequence up to the end of the part
        self._slots = to_device(slots, device)  # (T,)
        self._rectangles: list[_ChunkRectangle] | None = None
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
        if query.is_cuda and in_exactness():
            return self._attend_exactly(query, keys, values, scale, window)
        if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            if self._packed is None:
                self._packed = _PackedKeys(self._tables, self._ends, self._device, self._counts)
            return self._packed.attend(query, keys, values, scale, window)
        if self._rectangles is None:
            starts = np.cumsum(self._counts) - self._counts
            self._rectangles = [
                _ChunkRectangle(self._tables, self._counts, self._ends, starts, rows, self._device)
                for rows in plan_chunks(self._counts, self._ends)
            ]
        out = torch.empty_like(query)
        for part in self._rectangles:
            part.attend(query, keys, values, scale, window, out)
        return out

    def _attend_exactly(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        from caldera.models.exact_cuda import attend  # Triton comes with the torch for CUDA alone

        begins = np.cumsum(self._counts) - self._counts - (self._ends - self._counts)
        positions = np.arange(self._counts.sum()) - np.repeat(begins, self._counts)
        rows = np.repeat(np.arange(len(self._counts)), self._counts)
        pointers = np.array([keys.data_ptr(), values.data_ptr()])
        told, tables, rows_of, where = (
            to_device(array, self._device) for array in (pointers, self._tables, rows, positions)
        )
        return attend(query, keys, None, where, scale, window, (told, tables, rows_of, PAGE_SIZE))


def plan_chunks(counts: IntArray, ends: IntArray) -> list[IntArray]:
    """Groups of parts whose rectangle of queries and keys is not much more than their own."""
    groups: list[list[int]] = []
    most, area = 0, 0
    for row in np.lexsort((ends, counts)).tolist():
        count, end = int(counts[row]), int(ends[row])
        longest = max(most, end)
        size = len(groups[-1]) + 1 if groups else 1
        if not groups or size * count * longest > PADDING_WASTE * (area + count * end):
            groups.append([])
            size, longest, area = 1, end, 0
        groups[-1].append(row)
        most, area = longest, area + count * end
    return [np.array(group) for group in groups]


class _ChunkRectangle:
    """Some parts' queries and their sequences' pages, gathered, with a mask over what is unseen."""

    def __init__(
        self,
        tables: IntArray,
        counts: IntArray,
        ends: IntArray,
        starts: IntArray,
        rows: IntArray,
        device: torch.device,
    ) -> None:
        """`rows` are those of this rectangle; `starts`, where among the tokens each part begins."""
        counts, ends, starts = counts[rows], ends[rows], starts[rows]
        self._shape = (len(rows), int(counts.max()))  # (b, Q)
        width = -(-int(ends.max()) // PAGE_SIZE)
        self._pages = to_device(tables[rows, :width].ravel(), device)
        column = np.minimum(np.arange(self._shape[1]), counts[:, None] - 1)  # the last is repeated
        kept = np.flatnonzero(np.arange(self._shape[1]) < counts[:, None])
        cells = (starts[:, None] + column).ravel()
        self._cells = to_device(cells, device)  # (b * Q,)
        self._kept = to_device(kept, device)
        self._targets = to_device(cells[kept], device)
        self._seen = to_device((ends - counts)[:, None] + column, device)  # (b, Q) the last seen
        self._positions = torch.arange(width * PAGE_SIZE, device=device)
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        window: int | None,
        out: Tensor,
    ) -> None:
        """Writes the rows of `out` (T, Hq, D) that are these parts'."""
        heads, head_dim = keys.shape[2:]
        count, width = self._shape
        gathered = [
            pages.index_select(0, self._pages).view(count, -1, heads, head_dim).transpose(1, 2)
            for pages in (keys, values)
        ]  # (b, Hkv, L, D)
        grouped = query.index_select(0, self._cells).view(count, width, heads, -1, head_dim)
        grouped = grouped.permute(0, 2, 3, 1, 4)  # (b, Hkv, G, Q, D)
        groups = grouped.shape[2]
        mask = self._mask(window, query.dtype).repeat(1, 1, groups, 1)  # (b, 1, G * Q, L)
        attended = F.scaled_dot_product_attention(
            grouped.flatten(2, 3), gathered[0], gathered[1], attn_mask=mask, scale=scale
        )
        attended = attended.view(count, heads, groups, width, head_dim).permute(0, 3, 1, 2, 4)
        flat = attended.reshape(-1, *query.shape[1:])  # (b * Q, Hq, D)
        out.index_copy_(0, self._targets, flat.index_select(0, self._kept))

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, (b, 1, Q, L): 0 where a token is seen."""
        if window not in self._masks:
            unseen = self._positions > self._seen[..., None]
            if window is not None:
                unseen |= self._positions <= self._seen[..., None] - window
            mask = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device)
            self._masks[window] = mask.masked_fill_(unseen, float("-inf"))[:, None]
        return self._masks[window]


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

    def __init__(
        self,
        tables: IntArray,
        lengths: IntArray,
        device: torch.device,
        counts: IntArray | None = None,
    ) -> None:
        """`counts`: how many of each sequence's last tokens are queries; None: one."""
        self._lengths = to_device(lengths, device)
        self._longest = int(lengths.max())
        self._most_queries = 1 if counts is None else int(counts.max())
        self._queries = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
        if counts is not None:
            self._queries = to_device(np.cumsum([0, *counts]).astype(np.int32), device)  # (B + 1,)
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
            query, key, value, self._queries, self._cumulative,
            self._most_queries, self._longest, scale, window,
        )  # fmt: skip
