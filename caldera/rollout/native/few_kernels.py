"""Triton kernels of decode steps of few sequences: a layer is eight of them, each begun early.

What bounds such a step is not its arithmetic but how long one kernel waits for the next. So each
lets the next one start at once (CHAINED), reads what no kernel of the step has written (weights,
older keys and values), and only then waits until those before it have ended. The first kernel of a
step is not begun early: whatever ran before it has ended when any of them starts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from caldera.models.triton_attention import fold_block
from caldera.rollout.native.kernels import store_found


@triton.jit  # type: ignore[untyped-decorator]
def _block(
    source: tl.tensor, row: tl.tensor, inside: tl.tensor, start: tl.tensor, K: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Cells from `start` on of rows of (., K), as (N, DEPTH)."""
    k = start + tl.arange(0, DEPTH)
    there = inside[:, None] & (k < K)[None, :]
    return tl.load(source + row[:, None] * K + k[None, :], mask=there, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _slabs(
    source: tl.tensor, row: tl.tensor, inside: tl.tensor, start: tl.constexpr, K: tl.constexpr,
    SLABS: tl.constexpr, DEPTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The same as (SLABS, N, DEPTH): one slab a warp, so that short products take all of them."""
    k = start + (tl.arange(0, SLABS) * DEPTH)[:, None] + tl.arange(0, DEPTH)[None, :]
    there = inside[None, :, None] & (k < K)[:, None, :]
    cells = row[None, :, None] * K + k[:, None, :]
    return tl.load(source + cells, mask=there, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def pairs_kernel(
    values: tl.tensor, weight: tl.tensor, bias: tl.tensor, cos: tl.tensor, sin: tl.tensor,
    out: tl.tensor, size: tl.tensor, apart: tl.tensor, width: tl.tensor, K: tl.constexpr,
    HALF: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, SLABS: tl.constexpr,
    BLOCKS: tl.constexpr, TURNED: tl.constexpr, ROTATED: tl.constexpr, BIASED: tl.constexpr,
    STAGES: tl.constexpr, CHAINED: tl.constexpr,
) -> None:  # fmt: skip
    """values (B, K) by rows c and c + apart of the weight, HALF of them a program, to out (B, .).

    ROTATED: a head is two times `apart`, of which a program has a part; the first TURNED heads are
    rotated by cos and sin (B, 2 * apart). Otherwise SiLU of the first by the second, (B, apart).
    SLABS: all of K is in two chunks of so many, which are read before the wait; 0: in a loop.
    """
    if CHAINED:
        gdc_launch_dependents()
    group, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    pair = tl.arange(0, 2 * HALF)
    first = group * 2 * apart + block * HALF
    column = first + pair % HALF + (pair // HALF) * apart
    every = block * HALF + pair % HALF < apart
    row = tl.arange(0, ROWS)
    here = row < size
    cell = block * HALF + tl.arange(0, HALF)
    if SLABS > 0:
        one_weight = _slabs(weight, column, every, 0, K, SLABS, DEPTH)
        two_weight = _slabs(weight, column, every, SLABS * DEPTH, K, SLABS, DEPTH)
    if BIASED:
        added = tl.load(bias + column).to(tl.float32)
    if ROTATED:
        turned = here[None, :] & (cell < tl.where(group < TURNED, apart, 0))[:, None]
        angle = row[None, :] * (2 * apart) + cell[:, None]
        cosine = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
        sine = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
    if CHAINED:
        gdc_wait()
    if SLABS > 0:
        one_x = _slabs(values, row, here, 0, K, SLABS, DEPTH)
        two_x = _slabs(values, row, here, SLABS * DEPTH, K, SLABS, DEPTH)
        found = tl.dot(one_weight, tl.permute(one_x, (0, 2, 1)), input_precision="ieee")
        found = tl.dot(two_weight, tl.permute(two_x, (0, 2, 1)), found, input_precision="ieee")
        both = tl.sum(found, 0)  # (2 * HALF, ROWS)
    else:
        both = tl.zeros([2 * HALF, ROWS], tl.float32)
        for start in tl.range(0, K, DEPTH, num_stages=STAGES):
            one_weight = _block(weight, column, every, start, K, DEPTH)
            one_x = _block(values, row, here, start, K, DEPTH)
            both = tl.dot(one_weight, tl.trans(one_x), both, input_precision="ieee")
    if BIASED:
        both += added[:, None]
    one, two = tl.split(tl.permute(tl.reshape(both, (2, HALF, ROWS)), (1, 2, 0)))
    kept = here[None, :] & (cell < apart)[:, None]
    if ROTATED:
        target = out + row[None, :] * width + (group * 2 * apart + cell)[:, None]
        turned_one, turned_two = one * cosine - two * sine, two * cosine + one * sine
        tl.store(target, turned_one.to(out.dtype.element_ty), mask=kept)
        tl.store(target + apart, turned_two.to(out.dtype.element_ty), mask=kept)
    else:
        gated = one * tl.sigmoid(one) * two
        target = out + row[None, :] * width + cell[:, None]
        tl.store(target, gated.to(out.dtype.element_ty), mask=kept)


@triton.jit  # type: ignore[untyped-decorator]
def parts_kernel(
    values: tl.tensor, weight: tl.tensor, parts: tl.tensor, size: tl.tensor, columns: tl.tensor,
    K: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:  # fmt: skip
    """values (B, K) by weight (N, K), in parts of DEPTH cells of K: parts (P, B, N), float32."""
    if CHAINED:
        gdc_launch_dependents()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    inside = column < columns
    matrix = _block(weight, column, inside, part * DEPTH, K, DEPTH)
    row = tl.arange(0, ROWS)
    here = row < size
    if CHAINED:
        gdc_wait()
    vectors = _block(values, row, here, part * DEPTH, K, DEPTH)
    found = tl.dot(matrix, tl.trans(vectors), input_precision="ieee")  # (COLUMNS, ROWS)
    target = parts + (part * size + row)[None, :] * columns + column[:, None]
    tl.store(target, found, mask=here[None, :] & inside[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def settle_kernel(
    parts: tl.tensor, hidden: tl.tensor, scale: tl.tensor, normed: tl.tensor, size: tl.tensor,
    epsilon: tl.tensor, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr, CHAINED: tl.constexpr,
) -> None:  # fmt: skip
    """Add the parts (P, B, H) to hidden (B, H), in their order; normed (B, H) is what follows."""
    if CHAINED:
        gdc_launch_dependents()
    cell = tl.arange(0, WIDTH_PADDED)
    inside = cell < WIDTH
    factor = tl.load(scale + cell, mask=inside, other=0.0).to(tl.float32)
    if CHAINED:
        gdc_wait()
    row = tl.program_id(0)
    target = hidden + row * WIDTH + cell
    total = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        part = tl.arange(0, PARTS_PADDED)
        there = (part < PARTS)[:, None] & inside[None, :]
        cells = (part * size + row)[:, None] * WIDTH + cell[None, :]
        total += tl.sum(tl.load(parts + cells, mask=there, other=0.0), 0)
        tl.store(target, total.to(hidden.dtype.element_ty), mask=inside)
    total *= tl.rsqrt(tl.sum(total * total, 0) / WIDTH + epsilon)
    tl.store(normed + row * WIDTH + cell, (total * factor).to(normed.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _slots(
    tables: tl.tensor, token: tl.tensor, inside: tl.tensor, head: tl.tensor, PAGE: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    page = tl.load(tables + token // PAGE, mask=inside, other=0)
    return ((page.to(tl.int64) * PAGE + token % PAGE) * HEADS + head) * WIDTH


@triton.jit  # type: ignore[untyped-decorator]
def attention_kernel(
    heads: tl.tensor, pointers: tl.tensor, inputs: tl.tensor, tables: tl.tensor,
    partial: tl.tensor, weight: tl.tensor, table_stride: tl.tensor, size: tl.tensor,
    scale: tl.tensor, HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:  # fmt: skip
    """As `kernels.attend_pages`, but of heads (B, queries, keys, values), and older keys first."""
    if CHAINED:
        gdc_launch_dependents()
    place, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    element: tl.constexpr = heads.dtype.element_ty
    keys = tl.multiple_of(tl.load(pointers).to(tl.pointer_type(element)), 16)
    values = tl.multiple_of(tl.load(pointers + 1).to(tl.pointer_type(element)), 16)
    table = tables + tl.load(inputs + place) * table_stride
    position = tl.load(inputs + size + place)  # that of the new token, before which all is cached
    member, cell = tl.arange(0, GROUP_PADDED), tl.arange(0, WIDTH)
    span = tl.cdiv(tl.maximum(position, 0), SPLITS * KEYS) * KEYS
    begin = split * span
    end = tl.minimum(begin + span, position)
    token = begin + tl.arange(0, KEYS)
    inside = token < end
    cells = _slots(table, token, inside, head, PAGE, HEADS, WIDTH)[:, None] + cell[None, :]
    first_keys = tl.load(keys + cells, mask=inside[:, None], other=0.0)
    first_values = tl.load(values + cells, mask=inside[:, None], other=0.0)
    slot = _slots(table, tl.maximum(position, 0), position >= 0, head, PAGE, HEADS, WIDTH)
    if CHAINED:
        gdc_wait()
    own = heads + place * ((GROUP + 2) * HEADS * WIDTH) + cell
    known = (member < GROUP)[:, None] & (cell < WIDTH)[None, :]
    asked = tl.load(own + (head * GROUP + member)[:, None] * WIDTH, mask=known, other=0.0)
    largest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    gathered = tl.zeros([GROUP_PADDED, WIDTH], tl.float32)
    if split == 0:  # the new token, which sees itself
        mine = tl.load(own + (GROUP * HEADS + head) * WIDTH)
        told = tl.load(own + ((GROUP + 1) * HEADS + head) * WIDTH)
        kept = cell < tl.where(position >= 0, WIDTH, 0)
        tl.store(keys + slot + cell, mine, mask=kept)
        tl.store(values + slot + cell, told, mask=kept)
        largest = tl.sum(asked.to(tl.float32) * mine.to(tl.float32)[None, :], 1) * scale
        total += 1.0
        gathered += told.to(tl.float32)[None, :]
    if begin < end:
        largest, total, gathered = fold_block(
            asked, first_keys, first_values, inside, scale, largest, total, gathered
        )
    for start in range(begin + KEYS, end, KEYS):
        token = start + tl.arange(0, KEYS)
        inside = token < end
        cells = _slots(table, token, inside, head, PAGE, HEADS, WIDTH)[:, None] + cell[None, :]
        largest, total, gathered = fold_block(
            asked, tl.load(keys + cells, mask=inside[:, None], other=0.0),
            tl.load(values + cells, mask=inside[:, None], other=0.0), inside, scale,
            largest, total, gathered,
        )  # fmt: skip
    store_found(
        partial, weight, (place * HEADS + head) * GROUP + member, split, gathered, largest, total,
        known, member, cell, GROUP, WIDTH, SPLITS,
    )  # fmt: skip
