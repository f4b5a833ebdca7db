"""Triton kernels of decoding on CUDA: attention over pages, and the choice of the next tokens.

A step is recorded once for each size and replayed, so whatever changes from step to step is read
from memory: which rows of the tables are decoded, at which positions, and even where the cache is.
A place of a recorded step that no sequence needs has position -1 and changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from caldera.models.triton_attention import fold_block
from caldera.rollout.native.blocks import PAGE_SIZE

KEYS, MANY_KEYS = 64, 128
"""That a program reads at a time: more where there are few programs."""
STAGES = 3
"""Blocks of keys that are under way at a time."""
SMALLEST_PRODUCT = 16
"""Rows that a matrix product has at least: query heads of one key head are padded to them."""
ENOUGH_PROGRAMS = 528
"""Programs that keep a large GPU busy. Where there are fewer, several share a sequence's keys."""
MOST_SPLITS = 32
TILE = 4096
"""Logits that a program reads."""
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Triton is about to change its default for the second and warns where it is not said.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


# ---- the beginning of a step


def begin_step(inputs: Tensor, newest: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Enter the pages of the new tokens into the tables; returns tokens and positions, (1, B).

    inputs (5, B), int32: rows, positions, pages; the rest is for `choose`. newest (R,): each row's
    newest token. tables (R, pages).
    """
    size = inputs.shape[1]
    tokens = newest.new_empty(1, size)
    places = torch.empty_like(tokens)
    _begin_kernel[(triton.cdiv(size, 128),)](
        inputs, newest, tables, tokens, places, size, tables.stride(0),
        PAGE=PAGE_SIZE, BLOCK=128, **OPTIONS,
    )  # fmt: skip
    return tokens, places


@triton.jit  # type: ignore[untyped-decorator]
def _begin_kernel(
    inputs: tl.tensor, newest: tl.tensor, tables: tl.tensor, tokens: tl.tensor, places: tl.tensor,
    size: tl.tensor, table_stride: tl.tensor, PAGE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    row = tl.load(inputs + place, mask=inside, other=0)
    position = tl.load(inputs + size + place, mask=inside, other=-1)
    page = tl.load(inputs + 2 * size + place, mask=inside, other=0)
    taken = position >= 0
    position = tl.maximum(position, 0)
    tl.store(tables + row * table_stride + position // PAGE, page, mask=taken)
    token = tl.load(newest + row, mask=taken, other=0)
    tl.store(tokens + place, token, mask=inside)
    tl.store(places + place, position.to(tl.int64), mask=inside)


# ---- attention


def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pointers: Tensor,
    inputs: Tensor,
    tables: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Keep the new keys and values in the cache, and attend to all of each sequence, (B, Hq, D).

    query (B, Hq, D), key and value (B, Hkv, D): of one new token a place. pointers (2,): where the
    layer's pages of keys and of values begin.
    """
    size, heads, width = query.shape
    key_heads = key.shape[1]
    group = heads // key_heads
    splits = 1 << max(0, (ENOUGH_PROGRAMS // (size * key_heads)).bit_length() - 1)
    splits = min(splits, MOST_SPLITS)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    partial, weight = out, out
    if splits > 1:
        partial = query.new_empty(size, heads, splits, width, dtype=torch.float32)
        weight = query.new_empty(size, heads, splits, dtype=torch.float32)
    _attention_kernel[(size, key_heads, splits)](
        query, key, value, pointers, inputs, tables, partial, weight,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        value.stride(0), value.stride(1), tables.stride(0), size,
        scale * 1.4426950408889634, window or 0,
        HEADS=key_heads, GROUP=group, WIDTH=width,
        GROUP_PADDED=max(SMALLEST_PRODUCT, triton.next_power_of_2(group)),
        WIDTH_PADDED=triton.next_power_of_2(width), PAGE=PAGE_SIZE, SPLITS=splits,
        KEYS=MANY_KEYS if size * key_heads <= ENOUGH_PROGRAMS else KEYS,
        WINDOWED=window is not None, num_stages=STAGES, **OPTIONS,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(size * heads,)](
            partial, weight, out, WIDTH=width, WIDTH_PADDED=triton.next_power_of_2(width),
            SPLITS=splits, CHAINED=False, num_warps=1,
        )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _attention_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, pointers: tl.tensor, inputs: tl.tensor,
    tables: tl.tensor, partial: tl.tensor, weight: tl.tensor, query_stride: tl.tensor,
    query_head: tl.tensor, key_stride: tl.tensor, key_head: tl.tensor, value_stride: tl.tensor,
    value_head: tl.tensor, table_stride: tl.tensor, size: tl.tensor, scale: tl.tensor,
    window: tl.tensor, HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    GROUP_PADDED: tl.constexpr, WIDTH_PADDED: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, WINDOWED: tl.constexpr,
) -> None:  # fmt: skip
    """The keys in the cache are divided among the splits; the first also has the new key."""
    place, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    element: tl.constexpr = query.dtype.element_ty
    keys = tl.multiple_of(tl.load(pointers).to(tl.pointer_type(element)), 16)
    values = tl.multiple_of(tl.load(pointers + 1).to(tl.pointer_type(element)), 16)
    row = tl.load(inputs + place)
    position = tl.load(inputs + size + place)  # that of the new token, before which all is cached
    member = tl.arange(0, GROUP_PADDED)
    cell = tl.arange(0, WIDTH_PADDED)
    in_width = cell < WIDTH
    known = (member < GROUP)[:, None] & in_width[None, :]
    places = (head * GROUP + member)[:, None] * query_head + cell[None, :]
    asked = tl.load(query + place * query_stride + places, mask=known, other=0.0)

    first = tl.maximum(position + 1 - window, 0) if WINDOWED else 0
    span = tl.cdiv(tl.maximum(position - first, 0), SPLITS * KEYS) * KEYS
    begin = first + split * span
    end = tl.minimum(begin + span, position)
    largest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    gathered = tl.zeros([GROUP_PADDED, WIDTH_PADDED], tl.float32)
    if split == 0:  # the new token, which sees itself
        mine = tl.load(key + place * key_stride + head * key_head + cell, mask=in_width, other=0.0)
        told = tl.load(
            value + place * value_stride + head * value_head + cell, mask=in_width, other=0.0
        )
        page = tl.load(tables + row * table_stride + tl.maximum(position, 0) // PAGE)
        slot = ((page.to(tl.int64) * PAGE + position % PAGE) * HEADS + head) * WIDTH
        kept = cell < tl.where(position >= 0, WIDTH, 0)
        tl.store(keys + slot + cell, mine, mask=kept)
        tl.store(values + slot + cell, told, mask=kept)
        largest = tl.sum(asked.to(tl.float32) * mine.to(tl.float32)[None, :], 1) * scale
        total += 1.0
        gathered += told.to(tl.float32)[None, :]
    for start in range(begin, end, KEYS):
        token = start + tl.arange(0, KEYS)
        inside = token < end
        page = tl.load(tables + row * table_stride + token // PAGE, mask=inside, other=0)
        slot = ((page.to(tl.int64) * PAGE + token % PAGE) * HEADS + head) * WIDTH
        cells = slot[:, None] + cell[None, :]
        there = inside[:, None] & in_width[None, :]
        largest, total, gathered = fold_block(
            asked, tl.load(keys + cells, mask=there, other=0.0),
            tl.load(values + cells, mask=there, other=0.0), inside, scale,
            largest, total, gathered,
        )  # fmt: skip
    target = (place * HEADS + head) * GROUP + member
    store_found(
        partial, weight, target, split, gathered, largest, total, known, member, cell,
        GROUP, WIDTH, SPLITS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def store_found(
    partial: tl.tensor, weight: tl.tensor, target: tl.tensor, split: tl.tensor,
    gathered: tl.tensor, largest: tl.tensor, total: tl.tensor, known: tl.tensor, member: tl.tensor,
    cell: tl.tensor, GROUP: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """The whole answer of one split, or a part of it with its weight, which is a logarithm."""
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
def combine_kernel(
    partial: tl.tensor, weight: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr, SPLITS: tl.constexpr, CHAINED: tl.constexpr,
) -> None:  # fmt: skip
    """What the splits of one query head found, each by its weight, which is a logarithm.

    CHAINED: the kernel is begun before the one that found it has ended.
    """
    if CHAINED:
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


def keep(key: Tensor, value: Tensor, pointers: Tensor, inputs: Tensor, tables: Tensor) -> None:
    """Keep the new keys and values (B, Hkv, D) in the cache, of which the pointers (2,) tell."""
    size, heads, width = key.shape
    _keep_kernel[(size, heads)](
        key, value, pointers, inputs, tables, key.stride(0), key.stride(1),
        value.stride(0), value.stride(1), tables.stride(0), size,
        WIDTH=width, WIDTH_PADDED=triton.next_power_of_2(width), PAGE=PAGE_SIZE, num_warps=1,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _keep_kernel(
    key: tl.tensor, value: tl.tensor, pointers: tl.tensor, inputs: tl.tensor, tables: tl.tensor,
    key_stride: tl.tensor, key_head: tl.tensor, value_stride: tl.tensor, value_head: tl.tensor,
    table_stride: tl.tensor, size: tl.tensor, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
) -> None:  # fmt: skip
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


# ---- the next tokens


def choose(logits: Tensor, inputs: Tensor, newest: Tensor, raw: bool) -> Tensor:
    """A token and its log-prob for each place, (2, B): int32, and float32 in the same bits.

    logits (B, V). The fourth row of `inputs` has uniform random numbers and the fifth one over the
    temperature, as the bits of float32; 0 for the likeliest token, of temperature 1. The token is
    the first whose cumulated probability exceeds the random number. `raw`: the log-prob is that of
    temperature 1. Each row's newest token is set.
    """
    size, vocabulary = logits.shape
    tiles = triton.cdiv(vocabulary, TILE)
    found = torch.empty(4, size, tiles, dtype=torch.float32, device=logits.device)
    out = torch.empty(2, size, dtype=torch.int32, device=logits.device)
    _tile_kernel[(size, tiles)](
        logits, inputs, found, size, vocabulary, logits.stride(0),
        TILE=TILE, RAW=raw, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip
    _choose_kernel[(size,)](
        logits, inputs, found, newest, out, size, vocabulary, logits.stride(0), tiles,
        TILE=TILE, TILES=triton.next_power_of_2(tiles), RAW=raw, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _tile_kernel(
    logits: tl.tensor, inputs: tl.tensor, found: tl.tensor, size: tl.tensor, vocabulary: tl.tensor,
    stride: tl.tensor, TILE: tl.constexpr, RAW: tl.constexpr,
) -> None:  # fmt: skip
    """Of each tile: the largest logit and its place, and the sum of exponentials beside it."""
    place, tile = tl.program_id(0), tl.program_id(1)
    tiles = tl.num_programs(1)
    inverse = tl.load(inputs + 4 * size + place).to(tl.float32, bitcast=True)
    inverse = tl.where(inverse == 0, 1.0, inverse)
    token = tile * TILE + tl.arange(0, TILE)
    row = logits + place.to(tl.int64) * stride
    logit = tl.load(row + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    largest = tl.max(logit, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2((logit - base) * (inverse * LOG2_E)), 0)
    where = tl.argmax(logit, 0)
    target = found + place * tiles + tile
    cells = size * tiles
    tl.store(target, largest)
    tl.store(target + cells, total)
    tl.store(target + 2 * cells, where.to(tl.float32))
    if RAW:
        tl.store(target + 3 * cells, tl.sum(tl.exp2((logit - base) * LOG2_E), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _choose_kernel(
    logits: tl.tensor, inputs: tl.tensor, found: tl.tensor, newest: tl.tensor, out: tl.tensor,
    size: tl.tensor, vocabulary: tl.tensor, stride: tl.tensor, tiles: tl.tensor,
    TILE: tl.constexpr, TILES: tl.constexpr, RAW: tl.constexpr,
) -> None:  # fmt: skip
    """First the tile, by the sums of all, then the token in it."""
    place = tl.program_id(0)
    row, position = tl.load(inputs + place), tl.load(inputs + size + place)
    uniform = tl.load(inputs + 3 * size + place).to(tl.float32, bitcast=True)
    inverse = tl.load(inputs + 4 * size + place).to(tl.float32, bitcast=True)
    is_greedy = inverse == 0
    inverse = tl.where(is_greedy, 1.0, inverse)
    tile = tl.arange(0, TILES)
    cells = size * tiles
    source = found + place * tiles + tile
    largest = tl.load(source, mask=tile < tiles, other=float("-inf"))
    top = tl.max(largest, 0)
    share = tl.load(source + cells, mask=tile < tiles, other=0.0)
    share = share * tl.exp2((largest - top) * (inverse * LOG2_E))
    total = tl.sum(share, 0)
    aim = uniform * total
    before = tl.cumsum(share, 0) - share
    # The last tile that begins at or before the aim, and holds anything.
    chosen = tl.max(tl.where((before <= aim) & (share > 0), tile, 0), 0)
    passed = tl.sum(tl.where(tile == chosen, before, 0.0), 0)

    best = tl.argmax(largest, 0)
    likeliest = tl.load(found + 2 * cells + place * tiles + best).to(tl.int32) + best * TILE
    token = chosen * TILE + tl.arange(0, TILE)
    line = logits + place.to(tl.int64) * stride
    logit = tl.load(line + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    probability = tl.exp2((logit - top) * (inverse * LOG2_E))
    reached = passed + tl.cumsum(probability, 0)
    drawn = tl.min(tl.where((reached > aim) & (probability > 0), token, 2147483647), 0)
    last = tl.max(tl.where(probability > 0, token, 0), 0)  # where rounding let none reach the aim
    drawn = tl.where(is_greedy, likeliest, tl.minimum(drawn, last))
    said = tl.load(line + drawn).to(tl.float32) - top
    if RAW:
        plain = tl.load(source + 3 * cells, mask=tile < tiles, other=0.0)
        plain = tl.sum(plain * tl.exp2((largest - top) * LOG2_E), 0)
        log_prob = said - tl.log2(plain) * LN_2
    else:
        log_prob = said * inverse - tl.log2(total) * LN_2
    tl.store(out + place, drawn)
    tl.store(out + size + place, log_prob.to(tl.int32, bitcast=True))
    tl.store(newest + row, drawn.to(tl.int64), mask=position >= 0)
