"""Triton kernels of attention over pages: one new token a sequence, on CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from caldera.models.triton_attention import fold_block
from caldera.rollout.native.blocks import PAGE_SIZE
from caldera.rollout.native.cuda.launch import NO_PDL

SMALLEST_PRODUCT = 16
"""Rows that a matrix product has at least: query heads of one key head are padded to them."""
LOG2_E = 1.4426950408889634


class Plan(NamedTuple):
    """How the keys of a step's sequences are divided among programs."""

    keys: int  # that a program reads at a time
    splits: int  # programs that share the keys of a sequence
    warps: int
    stages: int  # blocks of keys that are under way at a time


PLANS = [
    (16, Plan(128, 16, 4, 3)),
    (32, Plan(128, 16, 2, 3)),
    (64, Plan(128, 8, 2, 3)),
    (128, Plan(128, 4, 4, 2)),
    (256, Plan(64, 4, 2, 2)),
    (512, Plan(128, 1, 4, 2)),
    (768, Plan(64, 1, 4, 2)),
    (1024, Plan(32, 1, 1, 5)),
    (1536, Plan(32, 1, 1, 3)),
    (1792, Plan(64, 1, 4, 2)),
]
"""Up to so many sequences by heads of keys: what was fastest on an H200 with heads of 64, each for
seven of queries, and as many keys as the sequences have when so many are left of a long tail."""
LARGEST_PLAN = Plan(32, 1, 1, 5)


def plan(size: int, key_heads: int, width: int) -> Plan:
    """For so many sequences."""
    programs = size * key_heads
    found = next((plan for most, plan in PLANS if programs <= most), LARGEST_PLAN)
    return found._replace(keys=min(found.keys, 8192 // triton.next_power_of_2(width)))


class Turn(NamedTuple):
    """The transform of queries and keys before attention: perhaps norms, and a rotation."""

    cosine: Tensor  # (positions, D)
    sine: Tensor
    query_norm: Tensor | None  # (D,)
    key_norm: Tensor | None
    epsilon: float


class Pages(NamedTuple):
    """Where the keys and values of a step's sequences are."""

    pointers: Tensor  # (2,) where the layer's pages of keys and of values begin
    inputs: Tensor  # (5, B), int32: rows of the tables and positions come first
    tables: Tensor  # (R, pages)


def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Pages,
    scale: float,
    window: int | None = None,
    turn: Turn | None = None,
    preload: bool = False,
    launch: Mapping[str, int] = NO_PDL,
) -> Tensor:
    """Keep the new keys and values in the cache, and attend to all of each sequence, (B, Hq, D).

    query (B, Hq, D), key and value (B, Hkv, D): of one new token a place. `preload`: read the first
    keys before the query is there. `launch`: how the kernels are launched.
    """
    size, heads, width = query.shape
    key_heads = key.shape[1]
    group = heads // key_heads
    padded = triton.next_power_of_2(width)
    how = plan(size, key_heads, width)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    partial, weight = out, out
    if how.splits > 1:
        partial = query.new_empty(size, heads, how.splits, width, dtype=torch.float32)
        weight = query.new_empty(size, heads, how.splits, dtype=torch.float32)
    turned = (None, None, None, None, 0.0) if turn is None else turn
    attention_kernel[(key_heads, size, how.splits)](
        query,
        key,
        value,
        pages.pointers,
        pages.inputs,
        pages.tables,
        partial,
        weight,
        *turned,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        pages.tables.stride(0),
        size,
        scale * LOG2_E,
        window or 0,
        HEADS=key_heads,
        GROUP=group,
        WIDTH=width,
        GROUP_PADDED=max(SMALLEST_PRODUCT, triton.next_power_of_2(group)),
        WIDTH_PADDED=padded,
        PAGE=PAGE_SIZE,
        KEYS=how.keys,
        SPLITS=how.splits,
        WINDOWED=window is not None,
        ROTATED=turn is not None,
        NORMED=turned[2] is not None,
        PRELOADED=preload,
        num_warps=how.warps,
        num_stages=how.stages,
        **launch,
    )
    if how.splits > 1:
        _combine_kernel[(size * heads,)](
            partial,
            weight,
            out,
            WIDTH=width,
            WIDTH_PADDED=padded,
            SPLITS=how.splits,
            num_warps=1,
            **launch,
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _slots(
    table: tl.tensor,
    token: tl.tensor,
    inside: tl.tensor,
    head: tl.tensor,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    page = tl.load(table + token // PAGE, mask=inside, other=0)
    return ((page.to(tl.int64) * PAGE + token % PAGE) * HEADS + head) * WIDTH


@triton.jit  # type: ignore[untyped-decorator]
def _block(
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    head: tl.tensor,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Keys and values (KEYS, D) from `start` on, and which of them come before the end."""
    token, cell = start + tl.arange(0, KEYS), tl.arange(0, WIDTH_PADDED)
    inside = token < end
    cells = _slots(table, token, inside, head, PAGE, HEADS, WIDTH)[:, None] + cell[None, :]
    there = inside[:, None] & (cell < WIDTH)[None, :]
    key = tl.load(keys + cells, mask=there, other=0.0)
    value = tl.load(values + cells, mask=there, other=0.0)
    return key, value, inside


@triton.jit  # type: ignore[untyped-decorator]
def _angle(
    table: tl.tensor, position: tl.tensor, WIDTH: tl.constexpr, ROTATED: tl.constexpr
) -> tl.tensor:
    """A row of cosines or sines, (D,)."""
    if ROTATED:
        cell = tl.maximum(position, 0) * WIDTH + tl.arange(0, WIDTH)
        return tl.load(table + cell).to(tl.float32)
    else:
        return 0.0


@triton.jit  # type: ignore[untyped-decorator]
def _heads(
    rows: tl.tensor,
    known: tl.tensor,
    norm: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    epsilon: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
) -> tl.tensor:
    """Heads that begin at `rows` (n,), normed and rotated by cosine and sine (D,): (n, D)."""
    cell = tl.arange(0, WIDTH_PADDED)
    there = known[:, None] & (cell < WIDTH)[None, :]
    found = tl.load(rows[:, None] + cell[None, :], mask=there, other=0.0)
    if ROTATED:
        other = (cell + WIDTH // 2) % WIDTH
        one = found.to(tl.float32)
        two = tl.load(rows[:, None] + other[None, :], mask=there, other=0.0).to(tl.float32)
        if NORMED:
            inverse = tl.rsqrt(tl.sum(one * one, 1) / WIDTH + epsilon)[:, None]
            one *= inverse * tl.load(norm + cell).to(tl.float32)[None, :]
            two *= inverse * tl.load(norm + other).to(tl.float32)[None, :]
        two = tl.where((cell < WIDTH // 2)[None, :], -two, two)
        found = (one * cosine[None, :] + two * sine[None, :]).to(found.dtype)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _see_itself(
    asked: tl.tensor,
    mine: tl.tensor,
    value_at: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    position: tl.tensor,
    scale: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Keep the new key (1, D) and value; what the queries find in them."""
    cell = tl.arange(0, WIDTH_PADDED)
    value = tl.load(value_at + cell, mask=cell < WIDTH, other=0.0)
    kept = cell < tl.where(position >= 0, WIDTH, 0)
    tl.store(keys + cell, tl.reshape(mine, [WIDTH_PADDED]), mask=kept)
    tl.store(values + cell, value, mask=kept)
    largest = tl.sum(asked.to(tl.float32) * mine.to(tl.float32), 1) * scale
    total = tl.full([GROUP_PADDED], 1.0, tl.float32)
    gathered = tl.zeros([GROUP_PADDED, WIDTH_PADDED], tl.float32) + value.to(tl.float32)[None, :]
    return largest, total, gathered


@triton.jit  # type: ignore[untyped-decorator]
def _share(
    position: tl.tensor,
    split: tl.tensor,
    window: tl.tensor,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """From where to where a split reads keys."""
    first = tl.maximum(position + 1 - window, 0) if WINDOWED else 0
    span = tl.cdiv(tl.maximum(position - first, 0), SPLITS * KEYS) * KEYS
    begin = first + split * span
    return begin, tl.minimum(begin + span, position)


@triton.jit  # type: ignore[untyped-decorator]
def attention_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    pointers: tl.tensor,
    inputs: tl.tensor,
    tables: tl.tensor,
    partial: tl.tensor,
    weight: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    epsilon: tl.tensor,
    query_stride: tl.tensor,
    query_head: tl.tensor,
    key_stride: tl.tensor,
    key_head: tl.tensor,
    value_stride: tl.tensor,
    value_head: tl.tensor,
    table_stride: tl.tensor,
    size: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    ROTATED: tl.constexpr,
    NORMED: tl.constexpr,
    PRELOADED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The keys in the cache are divided among the splits; the first also has the new key."""
    if PDL:
        gdc_launch_dependents()
    # Heads whose keys lie beside each other are read at the same time.
    head, place, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    element: tl.constexpr = query.dtype.element_ty
    keys = tl.multiple_of(tl.load(pointers).to(tl.pointer_type(element)), 16)
    values = tl.multiple_of(tl.load(pointers + 1).to(tl.pointer_type(element)), 16)
    table = tables + tl.load(inputs + place) * table_stride
    position = tl.load(inputs + size + place)  # that of the new token, before which all is cached
    begin, end = _share(position, split, window, KEYS, SPLITS, WINDOWED)
    if PRELOADED:
        old_keys, old_values, seen = _block(
            keys, values, table, begin, end, head, KEYS, PAGE, HEADS, WIDTH, WIDTH_PADDED
        )
    slot = _slots(table, tl.maximum(position, 0), position >= 0, head, PAGE, HEADS, WIDTH)
    cos, sin = _angle(cosine, position, WIDTH, ROTATED), _angle(sine, position, WIDTH, ROTATED)
    if PDL:
        gdc_wait()
    member, only = tl.arange(0, GROUP_PADDED), tl.arange(0, 1)
    own = query + place * query_stride + (head * GROUP + member) * query_head
    asked = _heads(
        own, member < GROUP, query_norm, cos, sin, epsilon, WIDTH, WIDTH_PADDED, NORMED, ROTATED
    )
    largest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    gathered = tl.zeros([GROUP_PADDED, WIDTH_PADDED], tl.float32)
    if split == 0:
        mine = key + place * key_stride + (head + only) * key_head
        largest, total, gathered = _see_itself(
            asked,
            _heads(
                mine, only == 0, key_norm, cos, sin, epsilon, WIDTH, WIDTH_PADDED, NORMED, ROTATED
            ),
            value + place * value_stride + head * value_head,
            keys + slot,
            values + slot,
            position,
            scale,
            WIDTH,
            WIDTH_PADDED,
            GROUP_PADDED,
        )
    if PRELOADED:
        if begin < end:
            largest, total, gathered = fold_block(
                asked, old_keys, old_values, seen, scale, largest, total, gathered
            )
        begin += KEYS
    for start in range(begin, end, KEYS):
        some_keys, some_values, inside = _block(
            keys, values, table, start, end, head, KEYS, PAGE, HEADS, WIDTH, WIDTH_PADDED
        )
        largest, total, gathered = fold_block(
            asked, some_keys, some_values, inside, scale, largest, total, gathered
        )
    target = (place * HEADS + head) * GROUP + member
    _store_found(partial, weight, target, split, gathered, largest, total, GROUP, WIDTH, SPLITS)


@triton.jit  # type: ignore[untyped-decorator]
def _store_found(
    partial: tl.tensor,
    weight: tl.tensor,
    target: tl.tensor,
    split: tl.tensor,
    gathered: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """The whole reply of one split, or a part of it with its weight, which is a logarithm."""
    member, cell = tl.arange(0, gathered.shape[0]), tl.arange(0, gathered.shape[1])
    known = (member < GROUP)[:, None] & (cell < WIDTH)[None, :]
    is_empty = total == 0  # as that of a split without keys
    total = tl.where(is_empty, 1.0, total)
    gathered = gathered / total[:, None]
    if SPLITS == 1:
        cells = target[:, None] * WIDTH + cell[None, :]
        tl.store(partial + cells, gathered.to(partial.dtype.element_ty), mask=known)
    else:
        cells = (target * SPLITS + split)[:, None] * WIDTH + cell[None, :]
        tl.store(partial + cells, gathered, mask=known)
        normaliser = tl.where(is_empty, float("-inf"), largest + tl.log2(total))
        tl.store(weight + target * SPLITS + split, normaliser, mask=member < GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def _combine_kernel(
    partial: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Combines the splits of one query head, each by its weight, which is a logarithm.

    PDL: the kernel is begun before the one that found it has ended.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    target = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    cell = tl.arange(0, WIDTH_PADDED)
    share = tl.load(weight + target * SPLITS + split)
    share = tl.exp2(share - tl.max(share, 0))  # the first split has seen the new token
    share = share / tl.sum(share, 0)
    cells = (target * SPLITS + split)[:, None] * WIDTH + cell[None, :]
    parts = tl.load(partial + cells, mask=(cell < WIDTH)[None, :], other=0.0)
    found = tl.sum(parts * share[:, None], 0)
    tl.store(out + target * WIDTH + cell, found.to(out.dtype.element_ty), mask=cell < WIDTH)


def keep(key: Tensor, value: Tensor, pages: Pages) -> None:
    """Keep the new keys and values (B, Hkv, D) in the cache."""
    size, heads, width = key.shape
    _keep_kernel[(size, heads)](
        key,
        value,
        *pages,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        pages.tables.stride(0),
        size,
        WIDTH=width,
        WIDTH_PADDED=triton.next_power_of_2(width),
        PAGE=PAGE_SIZE,
        num_warps=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _keep_kernel(
    key: tl.tensor,
    value: tl.tensor,
    pointers: tl.tensor,
    inputs: tl.tensor,
    tables: tl.tensor,
    key_stride: tl.tensor,
    key_head: tl.tensor,
    value_stride: tl.tensor,
    value_head: tl.tensor,
    table_stride: tl.tensor,
    size: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
) -> None:
    place, head = tl.program_id(0), tl.program_id(1)
    element: tl.constexpr = key.dtype.element_ty
    keys = tl.load(pointers).to(tl.pointer_type(element))
    values = tl.load(pointers + 1).to(tl.pointer_type(element))
    row, position = tl.load(inputs + place), tl.load(inputs + size + place)
    page = tl.load(tables + row * table_stride + tl.maximum(position, 0) // PAGE)
    cell = tl.arange(0, WIDTH_PADDED)
    slot = ((page.to(tl.int64) * PAGE + position % PAGE) * tl.num_programs(1) + head) * WIDTH
    kept = cell < tl.where(position >= 0, WIDTH, 0)
    mine = tl.load(key + place * key_stride + head * key_head + cell, mask=kept, other=0.0)
    tl.store(keys + slot + cell, mine, mask=kept)
    mine = tl.load(value + place * value_stride + head * value_head + cell, mask=kept, other=0.0)
    tl.store(values + slot + cell, mine, mask=kept)
