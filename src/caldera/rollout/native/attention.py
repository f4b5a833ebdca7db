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
from caldera.models.exact_norm import in_exactness
from caldera.models.forward import send
from caldera.rollout.native.blocks import PAGE_SIZE, IntArray
from caldera.rollout.native.cache import KVCache
from caldera.rollout.native.steps import Step


def to_device(array: NDArray[np.integer], device: torch.device) -> Tensor:
    return send(torch.from_numpy(array), device)


class PagedAttention:
    """The tokens of a step: they are kept, and each attends to its sequence up to itself.

    Whole sequences attend to what was computed with them. The keys of others are read from the
    cache: on CUDA in half precision the kernel takes them as they come; else sequences of
    similar size are gathered into rectangles.
    """

    def __init__(self, cache: KVCache, step: Step, device: torch.device) -> None:
        self._cache = cache
        self._step = step
        self._device = device
        self._slots = to_device(step.slots, device)  # (T,)
        self._whole = PackedSequences(step.counts.tolist(), device) if step.is_whole else None
        self._rectangles: list[_Rectangle] | None = None
        self._packed: _PackedKeys | None = None

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # under autocast the rotary embedding leaves query and key in float32, unlike the value
        query, key = query.to(value.dtype), key.to(value.dtype)
        number = layer.module.layer_idx
        self._cache.write(number, self._slots, key, value)
        if self._whole is not None:
            return self._whole.attend(layer, query, key, value)
        keys, values = self._cache.keys[number], self._cache.values[number]
        if query.is_cuda and in_exactness():
            return self._attend_exactly(layer, query, keys, values)
        if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            if self._packed is None:
                self._packed = _PackedKeys(self._step, self._device)
            return self._packed.attend(layer, query, keys, values)
        if self._rectangles is None:
            self._rectangles = [
                _Rectangle(self._step, rows, self._device)
                for rows in plan_rectangles(self._step.counts, self._step.ends)
            ]
        out = torch.empty_like(query)
        for part in self._rectangles:
            part.attend(layer, query, keys, values, out)
        return out

    def _attend_exactly(
        self, layer: AttentionLayer, query: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        from caldera.models.exact_cuda import attend  # Triton comes with the torch for CUDA alone

        step = self._step
        rows = np.repeat(np.arange(len(step.counts)), step.counts)
        pointers = np.array([keys.data_ptr(), values.data_ptr()])
        pages, tables, rows_of, where = (
            to_device(array, self._device)
            for array in (pointers, step.tables, rows, step.positions)
        )
        paged = (pages, tables, rows_of, PAGE_SIZE)
        return attend(query, keys, None, where, layer.scale, layer.window, paged)


def plan_rectangles(counts: IntArray, ends: IntArray) -> list[IntArray]:
    """Groups of sequences whose rectangle of queries and keys is not much more than their own."""
    areas = counts * ends
    if counts.max() * ends.max() * len(counts) <= PADDING_WASTE * areas.sum():
        return [np.arange(len(counts))]
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


class _Rectangle:
    """Some sequences' queries and pages, gathered, with a mask over what is unseen."""

    def __init__(self, step: Step, rows: IntArray, device: torch.device) -> None:
        """`rows` are its sequences."""
        starts = (np.cumsum(step.counts) - step.counts)[rows]
        counts, ends = step.counts[rows], step.ends[rows]
        self._shape = (len(rows), int(counts.max()))  # (b, Q)
        width = -(-int(ends.max()) // PAGE_SIZE)
        self._pages = to_device(step.tables[rows, :width].ravel(), device)
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
        self, layer: AttentionLayer, query: Tensor, keys: Tensor, values: Tensor, out: Tensor
    ) -> None:
        """Writes the rows of `out` (T, Hq, D) that are these sequences'."""
        heads, head_dim = keys.shape[2:]
        count, width = self._shape
        gathered = [
            pages.index_select(0, self._pages).view(count, -1, heads, head_dim).transpose(1, 2)
            for pages in (keys, values)
        ]  # (b, Hkv, L, D)
        grouped = query.index_select(0, self._cells).view(count, width, heads, -1, head_dim)
        grouped = grouped.permute(0, 2, 3, 1, 4)  # (b, Hkv, G, Q, D)
        groups = grouped.shape[2]
        mask = self._mask(layer.window, query.dtype)
        if width > 1:
            mask = mask.repeat(1, 1, groups, 1)  # (b, 1, G * Q, L)
        attended = F.scaled_dot_product_attention(
            grouped.flatten(2, 3), gathered[0], gathered[1], attn_mask=mask, scale=layer.scale
        )
        attended = attended.view(count, heads, groups, width, head_dim).permute(0, 3, 1, 2, 4)
        flat = attended.reshape(-1, *query.shape[1:])  # (b * Q, Hq, D)
        out.index_copy_(0, self._targets, flat.index_select(0, self._kept))

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """The mask that is added to the scores, (b, 1, Q, L): 0 where a token is seen."""
        if window not in self._masks:
            unseen = self._positions > self._seen[..., None]
            if window is not None:
                unseen |= self._positions <= self._seen[..., None] - window
            mask = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device)
            self._masks[window] = mask.masked_fill_(unseen, float("-inf"))[:, None]
        return self._masks[window]


class _PackedKeys:
    """The sequences' tokens, gathered end to end for PyTorch's variable-length flash kernel."""

    def __init__(self, step: Step, device: torch.device) -> None:
        counts, lengths = step.counts, step.ends
        self._lengths = to_device(lengths, device)
        self._longest = int(lengths.max())
        self._most_queries = int(counts.max())
        self._queries = to_device(np.cumsum([0, *counts]).astype(np.int32), device)  # (B + 1,)
        self._cumulative = F.pad(self._lengths.cumsum(0), (1, 0)).to(torch.int32)  # (B + 1,)
        positions = torch.arange(self._longest, device=device)
        pages = to_device(step.tables, device)[:, positions // PAGE_SIZE]  # (B, longest)
        slots = pages * PAGE_SIZE + positions % PAGE_SIZE
        kept = positions < self._lengths[:, None]
        flat = torch.nonzero_static(kept.flatten(), size=int(lengths.sum())).flatten()
        self._slots = slots.flatten().index_select(0, flat)  # (sum of lengths,)

    def attend(self, layer: AttentionLayer, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        key, value = (
            pages.view(-1, *pages.shape[2:]).index_select(0, self._slots)
            for pages in (keys, values)
        )
        return flash_attention(
            query,
            key,
            value,
            self._queries,
            self._cumulative,
            self._most_queries,
            self._longest,
            layer.scale,
            layer.window,
        )
