"""The Triton kernels of `exact` on CUDA: each row's numbers are added up in one order.

A program of these kernels works on so many rows of a matrix product, one row of a mean, or one
token's query heads, always with the same shapes, whatever else the batch holds. Blocks of keys are
counted from the start of the sequence, in the sampler's pages as in the trainer's packed tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from caldera.models.triton_attention import fold_block

DEPTH = 64
"""How much of a matrix product's sums is taken at a time. The tile beside it may have any shape:
the numbers of each cell are added up alike."""
WIDE = 2**16
"""Columns of a language head, whose tiles are larger."""
KEYS = 64
SMALLEST_PRODUCT = 16
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


def product(
    values: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """values (R, K), weight (N, K), bias (N,); returns (R, N) in their dtype."""
    rows, depth = values.shape
    columns = weight.shape[0]
    if out is None:
        out = values.new_empty(rows, columns)
    tile = (128, 256) if columns >= WIDE else (128, 64) if rows <= 512 else (64, 128)
    grid = (triton.cdiv(rows, tile[0]) * triton.cdiv(columns, tile[1]),)
    _product_kernel[grid](
        values,
        weight,
        out if bias is None else bias,
        out,
        rows,
        columns,
        depth,
        values.stride(0),
        values.stride(1),
        weight.stride(0),
        weight.stride(1),
        out.stride(0),
        ROWS=tile[0],
        COLUMNS=tile[1],
        DEPTH=DEPTH,
        BIASED=bias is not None,
        num_stages=4,
        num_warps=8 if columns >= WIDE else 4,
        enable_fp_fusion=True,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _product_kernel(
    values: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    value_row: tl.tensor,
    value_cell: tl.tensor,
    weight_row: tl.tensor,
    weight_cell: tl.tensor,
    out_row: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """Programs that share rows of the weight follow each other, so that it is read once."""
    tiles = tl.cdiv(rows, ROWS)
    row = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) // tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    cell = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    left = values + row[:, None] * value_row + cell[None, :] * value_cell
    right = weight + column[None, :] * weight_row + cell[:, None] * weight_cell
    for start in range(0, depth, DEPTH):
        inside = start + cell < depth
        one = tl.load(left, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        other = tl.load(right, mask=(column < columns)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(one, other, total, input_precision="ieee")
        left += DEPTH * value_cell
        right += DEPTH * weight_cell
    if BIASED:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    place = out + row[:, None] * out_row + column[None, :]
    there = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=there)


def row_means(values: Tensor) -> Tensor:
    """values (..., K); returns (...) in their dtype."""
    width = values.shape[-1]
    rows = values.reshape(-1, width)
    out = values.new_empty(len(rows))
    _mean_kernel[(len(rows),)](
        rows, out, width, rows.stride(0), WIDTH=triton.next_power_of_2(width), **OPTIONS
    )
    return out.view(values.shape[:-1])


@triton.jit  # type: ignore[untyped-decorator]
def _mean_kernel(
    values: tl.tensor, out: tl.tensor, width: tl.tensor, stride: tl.tensor, WIDTH: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cell = tl.arange(0, WIDTH)
    found = tl.load(values + row * stride + cell, mask=cell < width, other=0.0)
    tl.store(out + row, tl.sum(found, 0) / width)


def rms_norm(values: Tensor, weight: Tensor, epsilon: float, shifted: bool) -> Tensor:
    """values (..., K), weight (K,); see `exact_norm`."""
    width = values.shape[-1]
    rows = values.reshape(-1, width)
    out = torch.empty(rows.shape, dtype=values.dtype, device=values.device)
    _norm_kernel[(len(rows),)](
        rows,
        weight,
        out,
        width,
        rows.stride(0),
        epsilon,
        WIDTH=triton.next_power_of_2(width),
        SHIFTED=shifted,
        **OPTIONS,
    )
    return out.view(values.shape)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_kernel(
    values: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    epsilon: tl.tensor,
    WIDTH: tl.constexpr,
    SHIFTED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cell = tl.arange(0, WIDTH)
    inside = cell < width
    found = tl.load(values + row * stride + cell, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + cell, mask=inside, other=0.0)
    normed = found * tl.rsqrt(tl.sum(found * found, 0) / width + epsilon)
    if SHIFTED:
        normed = normed * (1.0 + scale.to(tl.float32))
    else:
        normed = normed.to(out.dtype.element_ty).to(tl.float32) * scale.to(tl.float32)
    tl.store(out + row * width + cell, normed.to(out.dtype.element_ty), mask=inside)


def attend(
    query: Tensor,
    keys: Tensor | None,
    values: Tensor | None,
    positions: Tensor,
    scale: float,
    window: int | None,
    paged: tuple[Tensor, Tensor, Tensor, int] | None = None,
) -> Tensor:
    """Causal attention of single tokens, (T, Hq, D) as the query.

    positions (T,): of each token in its sequence; -1: no token. Keys and values (T, Hkv, D) lie as
    the queries do, each sequence's behind each other; or else in pages: `paged` is where those of
    keys and of values begin (2,), the tables (rows, pages), the row of each token (T,), and how
    many tokens a page has. Keys are then told apart by their heads and width alone.
    """
    tokens, heads, width = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if paged is None:
        assert keys is not None and values is not None
        key_heads, page = keys.shape[1], 1
        pointers = tables = rows = positions
        strides = (keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), 0)
    else:
        pointers, tables, rows, page = paged
        assert keys is not None
        key_heads, values = keys.shape[-2], keys
        strides = (key_heads * width, width, key_heads * width, width, tables.stride(0))
    group = heads // key_heads
    _attention_kernel[(tokens, key_heads)](
        query,
        keys,
        values,
        out,
        positions,
        pointers,
        tables,
        rows,
        query.stride(0),
        query.stride(1),
        *strides,
        scale * 1.4426950408889634,
        window or 0,
        GROUP=group,
        WIDTH=width,
        GROUP_PADDED=max(SMALLEST_PRODUCT, triton.next_power_of_2(group)),
        WIDTH_PADDED=triton.next_power_of_2(width),
        PAGE=page,
        KEYS=KEYS,
        PAGED=paged is not None,
        WINDOWED=window is not None,
        num_stages=3,
        **OPTIONS,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _attention_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    positions: tl.tensor,
    pointers: tl.tensor,
    tables: tl.tensor,
    rows: tl.tensor,
    query_stride: tl.tensor,
    query_head: tl.tensor,
    key_stride: tl.tensor,
    key_head: tl.tensor,
    value_stride: tl.tensor,
    value_head: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    PAGED: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element: tl.constexpr = query.dtype.element_ty
    position = tl.load(positions + token).to(tl.int32)
    row = token - position  # where its sequence begins
    if PAGED:
        keys = tl.multiple_of(tl.load(pointers).to(tl.pointer_type(element)), 16)
        values = tl.multiple_of(tl.load(pointers + 1).to(tl.pointer_type(element)), 16)
        row = tl.load(rows + token).to(tl.int64)
    member = tl.arange(0, GROUP_PADDED)
    cell = tl.arange(0, WIDTH_PADDED)
    known = (member < GROUP)[:, None] & (cell < WIDTH)[None, :]
    places = (head * GROUP + member)[:, None] * query_head + cell[None, :]
    asked = tl.load(query + token * query_stride + places, mask=known, other=0.0)
    largest = tl.full([GROUP_PADDED], -1.0e30, tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    gathered = tl.zeros([GROUP_PADDED, WIDTH_PADDED], tl.float32)
    first = tl.maximum(position + 1 - window, 0) if WINDOWED else 0
    for start in range(first // KEYS * KEYS, position + 1, KEYS):
        place = start + tl.arange(0, KEYS)
        inside = place <= position
        if WINDOWED:
            inside = inside & (place >= first)
        index = row + place
        if PAGED:
            page = tl.load(tables + row * table_stride + place // PAGE, mask=inside, other=0)
            index = page.to(tl.int64) * PAGE + place % PAGE
        there = inside[:, None] & (cell < WIDTH)[None, :]
        cells = index[:, None] * key_stride + head * key_head + cell[None, :]
        block = tl.load(keys + cells, mask=there, other=0.0)
        cells = index[:, None] * value_stride + head * value_head + cell[None, :]
        told = tl.load(values + cells, mask=there, other=0.0)
        largest, total, gathered = fold_block(
            asked, block, told, inside, scale, largest, total, gathered
        )
    gathered = gathered / tl.maximum(total, 1e-30)[:, None]
    target = (token * tl.num_programs(1) + head) * GROUP + member
    tl.store(out + target[:, None] * WIDTH + cell[None, :], gathered.to(element), mask=known)
