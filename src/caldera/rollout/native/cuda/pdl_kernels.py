"""Triton kernels of decode steps, beside attention's, for programmatic dependent launch (PDL).

A step of few sequences is not bound by its arithmetic but by how long one kernel waits for the
next. So each lets the next one start at once (PDL), reads what no kernel of the step but the
first has written (weights, older keys and values), and only then waits until those before it have
ended. The first two kernels of a step are launched without PDL: whatever ran before the second, the
first included, has ended when any of those behind it starts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from caldera.rollout.native.cuda.step_kernels import read_message

EARLY, LATE = tl.constexpr(1), tl.constexpr(2)
"""When a kernel launched with PDL lets the next one start: at once, or when it has read all.
The numbers of `launch.py`: Triton's kernels see only constexpr constants."""


@triton.jit  # type: ignore[untyped-decorator]
def _block(
    source: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    start: tl.tensor,
    K: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """Cells from `start` on of rows of (., K), as (N, DEPTH)."""
    k = start + tl.arange(0, DEPTH)
    there = inside[:, None] & (k < K)[None, :]
    return tl.load(source + row[:, None] * K + k[None, :], mask=there, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _slabs(
    source: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    start: tl.constexpr,
    K: tl.constexpr,
    SLABS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """The same as (SLABS, N, DEPTH): warps share the slabs, so that short products take all of
    them."""
    k = start + (tl.arange(0, SLABS) * DEPTH)[:, None] + tl.arange(0, DEPTH)[None, :]
    there = inside[None, :, None] & (k < K)[:, None, :]
    cells = row[None, :, None] * K + k[:, None, :]
    return tl.load(source + cells, mask=there, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _columns(
    width: tl.tensor, COLUMNS: tl.constexpr, GATED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Cells of the result that a program has, and rows of the weight, (COLUMNS,) each."""
    step = tl.arange(0, COLUMNS)
    if GATED:
        cell = tl.program_id(0) * (COLUMNS // 2) + step % (COLUMNS // 2)
        return cell, cell + step // (COLUMNS // 2) * width
    else:
        cell = tl.program_id(0) * COLUMNS + step
        return cell, cell


@triton.jit  # type: ignore[untyped-decorator]
def product_kernel(
    values: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    width: tl.tensor,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    SLABS: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """values (B, K) by COLUMNS rows of the weight a program, to out (B, width).

    GATED: by rows c and c + width of the weight (2 * width, K); SiLU of the first by the second.
    SLABS: all of K is in two chunks of so many, which are read before the wait; 0: in a loop.
    """
    if PDL:
        gdc_launch_dependents()
    cell, column = _columns(width, COLUMNS, GATED)
    every = cell < width
    row = tl.arange(0, ROWS)
    here = row < size
    if SLABS > 0:
        one_weight = _slabs(weight, column, every, 0, K, SLABS, DEPTH)
        two_weight = _slabs(weight, column, every, SLABS * DEPTH, K, SLABS, DEPTH)
    if BIASED:
        added = tl.load(bias + column, mask=every, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    if SLABS > 0:
        one_x = _slabs(values, row, here, 0, K, SLABS, DEPTH)
        two_x = _slabs(values, row, here, SLABS * DEPTH, K, SLABS, DEPTH)
        found = tl.dot(one_weight, tl.permute(one_x, (0, 2, 1)), input_precision="ieee")
        found = tl.dot(two_weight, tl.permute(two_x, (0, 2, 1)), found, input_precision="ieee")
        both = tl.sum(found, 0)  # (COLUMNS, ROWS)
    else:
        both = tl.zeros([COLUMNS, ROWS], tl.float32)
        for start in tl.range(0, K, DEPTH, num_stages=STAGES):
            matrix = _block(weight, column, every, start, K, DEPTH)
            x = _block(values, row, here, start, K, DEPTH)
            both = tl.dot(matrix, tl.trans(x), both, input_precision="ieee")
    if BIASED:
        both += added[:, None]
    if GATED:
        pairs = tl.permute(tl.reshape(both, (2, COLUMNS // 2, ROWS)), (1, 2, 0))
        one, two = tl.split(pairs)
        both = one * tl.sigmoid(one) * two
        cell = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    target = out + row[None, :] * width + cell[:, None]
    kept = here[None, :] & (cell < width)[:, None]
    tl.store(target, both.to(out.dtype.element_ty), mask=kept)


@triton.jit  # type: ignore[untyped-decorator]
def split_k_kernel(
    values: tl.tensor,
    weight: tl.tensor,
    parts: tl.tensor,
    size: tl.tensor,
    columns: tl.tensor,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """values (B, K) by weight (N, K), split-K by DEPTH cells of K: parts (P, B, N), float32."""
    if PDL:
        gdc_launch_dependents()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    inside = column < columns
    matrix = _block(weight, column, inside, part * DEPTH, K, DEPTH)
    row = tl.arange(0, ROWS)
    here = row < size
    if PDL:
        gdc_wait()
    vectors = _block(values, row, here, part * DEPTH, K, DEPTH)
    found = tl.dot(matrix, tl.trans(vectors), input_precision="ieee")  # (COLUMNS, ROWS)
    target = parts + (part * size + row)[None, :] * columns + column[:, None]
    tl.store(target, found, mask=here[None, :] & inside[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _tile(at: tl.tensor, k: tl.tensor, left: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """Cells `k` of some rows, of which so many are left."""
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(k < left)[None, :], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def tile_kernel(
    values: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    width: tl.tensor,
    span: tl.tensor,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """values (B, K) by the weight, split-K by `span` cells of K, to out (P, B, width).

    A program has ROWS of B and COLUMNS of the width, for one part.
    """
    if PDL:
        gdc_launch_dependents()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    begin = part * span
    end = tl.minimum(begin + span, K)
    k = tl.arange(0, DEPTH)
    weight_at = weight + tl.minimum(column, width - 1)[:, None] * K + k[None, :]
    values_at = values + tl.minimum(row, size - 1)[:, None] * K + k[None, :]
    even: tl.constexpr = K % DEPTH == 0
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    if PDL:
        gdc_wait()
    for start in tl.range(begin, end, DEPTH, num_stages=STAGES):
        rows = _tile(values_at + start, k, end - start, even)
        matrix = _tile(weight_at + start, k, end - start, even)
        found = tl.dot(rows, tl.trans(matrix), found, input_precision="ieee")
    if BIASED:
        found += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    target = out + (part * size + row)[:, None] * width + column[None, :]
    kept = (row < size)[:, None] & (column < width)[None, :]
    tl.store(target, found.to(out.dtype.element_ty), mask=kept)


@triton.jit  # type: ignore[untyped-decorator]
def _store_normed(
    total: tl.tensor,
    factor: tl.tensor,
    normed: tl.tensor,
    cell: tl.tensor,
    inside: tl.tensor,
    epsilon: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    total *= tl.rsqrt(tl.sum(total * total, 0) / WIDTH + epsilon)
    tl.store(normed + cell, (total * factor).to(normed.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def begin_kernel(
    messages: tl.tensor,
    next_message: tl.tensor,
    inputs: tl.tensor,
    newest: tl.tensor,
    tables: tl.tensor,
    embedding: tl.tensor,
    scale: tl.tensor,
    hidden: tl.tensor,
    normed: tl.tensor,
    size: tl.tensor,
    message_stride: tl.tensor,
    table_stride: tl.tensor,
    epsilon: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    FIELDS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    """Enter the page of each new token into the tables; hidden (B, H) is the token's embedding.

    inputs (5, B): filled with the message's. newest (R,): each row's newest token.
    """
    place = tl.program_id(0) + tl.arange(0, 1)
    cell = tl.arange(0, WIDTH_PADDED)
    inside = cell < WIDTH
    row, position, page = read_message(
        messages, next_message, inputs, place, size, message_stride, FIELDS, INPUTS
    )
    taken = position >= 0
    tl.store(tables + row * table_stride + tl.maximum(position, 0) // PAGE, page, mask=taken)
    token = tl.sum(tl.load(newest + row, mask=taken, other=0), 0)  # the one that there is
    found = tl.load(embedding + token * WIDTH + cell, mask=inside, other=0.0)
    own = tl.program_id(0) * WIDTH
    tl.store(hidden + own + cell, found, mask=inside)
    factor = tl.load(scale + cell, mask=inside, other=0.0).to(tl.float32)
    _store_normed(found.to(tl.float32), factor, normed + own, cell, inside, epsilon, WIDTH)


@triton.jit  # type: ignore[untyped-decorator]
def add_norm_kernel(
    parts: tl.tensor,
    hidden: tl.tensor,
    scale: tl.tensor,
    normed: tl.tensor,
    size: tl.tensor,
    epsilon: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Add the partial sums (P, B, H) to hidden (B, H), in their order; normed (B, H) follows."""
    if PDL == EARLY:
        gdc_launch_dependents()
    cell = tl.arange(0, WIDTH_PADDED)
    inside = cell < WIDTH
    factor = tl.load(scale + cell, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    row = tl.program_id(0)
    target = hidden + row * WIDTH + cell
    total = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    part = tl.arange(0, PARTS_PADDED)
    there = (part < PARTS)[:, None] & inside[None, :]
    cells = (part * size + row)[:, None] * WIDTH + cell[None, :]
    total += tl.sum(tl.load(parts + cells, mask=there, other=0.0).to(tl.float32), 0)
    if PDL == LATE:
        gdc_launch_dependents()
    tl.store(target, total.to(hidden.dtype.element_ty), mask=inside)
    _store_normed(total, factor, normed + row * WIDTH, cell, inside, epsilon, WIDTH)


@triton.jit  # type: ignore[untyped-decorator]
def gate_kernel(
    both: tl.tensor, out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr, PDL: tl.constexpr
) -> None:
    """SiLU of the first half of both (B, 2 * width) by the second, to out (B, width)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cell = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < width
    source = both + row * 2 * width + cell
    one = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    gated = one * tl.sigmoid(one) * two
    tl.store(out + row * width + cell, gated.to(out.dtype.element_ty), mask=inside)
