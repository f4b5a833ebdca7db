"""Triton kernels that begin and end a step of decoding: which tokens, and what follows them.

A step is captured in a CUDA graph for each size and replayed, so whatever changes from step to
step is read from memory: which rows of the tables are decoded, at which positions, and even where
the cache is. A place of a captured step that no sequence needs has position -1 and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from caldera.rollout.native.blocks import PAGE_SIZE
from caldera.rollout.native.cuda.graphs import FIELDS, INPUTS, MESSAGES, HostMailbox
from caldera.rollout.native.cuda.launch import NO_PDL
from caldera.rollout.native.sampler import GROUP, TILE

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


# ---- the beginning of a step


def begin_step(
    mailbox: HostMailbox, inputs: Tensor, newest: Tensor, tables: Tensor
) -> tuple[Tensor, Tensor]:
    """Enter the pages of the new tokens into the tables; returns tokens and positions, (1, B).

    inputs (5, B), int32: filled with the message's. newest (R,): each row's newest token. tables
    (R, pages).
    """
    size = inputs.shape[1]
    tokens = newest.new_empty(1, size)
    places = torch.empty_like(tokens)
    _begin_kernel[(triton.cdiv(size, 128),)](
        mailbox.messages,
        mailbox.next_message,
        inputs,
        newest,
        tables,
        tokens,
        places,
        size,
        mailbox.messages.stride(0),
        tables.stride(0),
        PAGE=PAGE_SIZE,
        BLOCK=128,
        FIELDS=FIELDS,
        INPUTS=INPUTS,
        num_warps=4,
    )
    return tokens, places


@triton.jit  # type: ignore[untyped-decorator]
def _field(fields: tl.tensor, field: tl.constexpr) -> tl.tensor:
    which = tl.arange(0, fields.shape[1])
    return tl.sum(tl.where((which == field)[None, :], fields, 0), 1)


@triton.jit  # type: ignore[untyped-decorator]
def read_message(
    messages: tl.tensor,
    next_message: tl.tensor,
    inputs: tl.tensor,
    place: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    FIELDS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Copy the message of some places (n,) to the inputs; returns rows, positions and pages, (n,)
    each."""
    field = tl.arange(0, FIELDS)
    inside = (place < size)[:, None]
    message = messages + tl.load(next_message) * stride
    fields = tl.load(message + place[:, None] * FIELDS + field[None, :], mask=inside, other=0)
    target = inputs + field[None, :] * size + place[:, None]
    tl.store(target, fields, mask=inside & (field < INPUTS)[None, :])
    return _field(fields, 0), _field(fields, 1), _field(fields, 2)


@triton.jit  # type: ignore[untyped-decorator]
def _begin_kernel(
    messages: tl.tensor,
    next_message: tl.tensor,
    inputs: tl.tensor,
    newest: tl.tensor,
    tables: tl.tensor,
    tokens: tl.tensor,
    places: tl.tensor,
    size: tl.tensor,
    message_stride: tl.tensor,
    table_stride: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    row, position, page = read_message(
        messages, next_message, inputs, place, size, message_stride, FIELDS, INPUTS
    )
    taken = inside & (position >= 0)
    position = tl.maximum(position, 0)
    tl.store(tables + row * table_stride + position // PAGE, page, mask=taken)
    token = tl.load(newest + row, mask=taken, other=0)
    tl.store(tokens + place, token, mask=inside)
    tl.store(places + place, position.to(tl.int64), mask=inside)


# ---- the next tokens


def choose(
    logits: Tensor,
    inputs: Tensor,
    newest: Tensor,
    raw: bool,
    launch: Mapping[str, int] = NO_PDL,
    mailbox: HostMailbox | None = None,
) -> Tensor:
    """A token and its log-prob for each place, (2, B): int32, and float32 in the same bits.

    logits (B, V). The fourth row of `inputs` has random words and the fifth one over the
    temperature, as the bits of float32; 0 for the likeliest token, of temperature 1. The token is
    that which `sample` finds, but for rounding. `raw`: the log-prob is that of
    temperature 1. Each row's newest token is set. `mailbox`: of a step that read a message:
    the reply is written to it, too, and the next step reads the next message.
    """
    size, vocabulary = logits.shape
    tiles = triton.cdiv(vocabulary, TILE)
    found = torch.empty(3, size, tiles, dtype=torch.float32, device=logits.device)
    out = torch.empty(2, size, dtype=torch.int32, device=logits.device)
    next_message, replies, stride = None, None, 0
    if mailbox is not None:
        next_message, replies, stride = (
            mailbox.next_message,
            mailbox.replies,
            mailbox.replies.stride(0),
        )
    _tile_kernel[(size, tiles)](
        logits,
        inputs,
        found,
        next_message,
        size,
        vocabulary,
        logits.stride(0),
        TILE=TILE,
        RAW=raw,
        MESSAGES=MESSAGES,
        num_warps=8,
        **launch,
    )
    _choose_kernel[(size,)](
        logits,
        inputs,
        found,
        newest,
        out,
        next_message,
        replies,
        size,
        vocabulary,
        logits.stride(0),
        tiles,
        stride,
        GROUP=GROUP,
        TILES=triton.next_power_of_2(tiles),
        RAW=raw,
        MESSAGES=MESSAGES,
        num_warps=8,
        **launch,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _tile_kernel(
    logits: tl.tensor,
    inputs: tl.tensor,
    found: tl.tensor,
    next_message: tl.tensor,
    size: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    TILE: tl.constexpr,
    RAW: tl.constexpr,
    MESSAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Of each tile: the largest logit, and the sum of exponentials beside it."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place, tile = tl.program_id(0), tl.program_id(1)
    tiles = tl.num_programs(1)
    if next_message is not None:  # the message was read by a kernel that has ended
        tl.store(
            next_message, (tl.load(next_message) + 1) % MESSAGES, mask=(place == 0) & (tile == 0)
        )
    inverse = tl.load(inputs + 4 * size + place).to(tl.float32, bitcast=True)
    inverse = tl.where(inverse == 0, 1.0, inverse)
    token = tile * TILE + tl.arange(0, TILE)
    row = logits + place.to(tl.int64) * stride
    logit = tl.load(row + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    largest = tl.max(logit, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2((logit - base) * (inverse * LOG2_E)), 0)
    target = found + place * tiles + tile
    cells = size * tiles
    tl.store(target, largest)
    tl.store(target + cells, total)
    if RAW:
        tl.store(target + 2 * cells, tl.sum(tl.exp2((logit - base) * LOG2_E), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _exponential(word: tl.tensor, race: tl.constexpr, place: tl.tensor) -> tl.tensor:
    """A number for each place; like `exponentials` in `sampler.py`."""
    state = word + (race * 65536 + place).to(tl.uint32) * 0x9E3779B9
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    state = state ^ (state >> 16)
    return -tl.log(((state >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07)


@triton.jit  # type: ignore[untyped-decorator]
def _winner(weights: tl.tensor, word: tl.tensor, race: tl.constexpr, place: tl.tensor) -> tl.tensor:
    score = weights / _exponential(word, race, place)
    return tl.argmax(tl.where(score > 0, score, 0.0), 0)  # not NaN, which has no order


@triton.jit  # type: ignore[untyped-decorator]
def _choose_kernel(
    logits: tl.tensor,
    inputs: tl.tensor,
    found: tl.tensor,
    newest: tl.tensor,
    out: tl.tensor,
    next_message: tl.tensor,
    replies: tl.tensor,
    size: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    tiles: tl.tensor,
    reply_stride: tl.tensor,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    RAW: tl.constexpr,
    MESSAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """First the tile, by the sums of all, then the group of its tokens, then the token."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0)
    row, position = tl.load(inputs + place), tl.load(inputs + size + place)
    word = tl.load(inputs + 3 * size + place).to(tl.uint32, bitcast=True)
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
    chosen = _winner(share, word, 0, tile)
    chosen = tl.where(is_greedy, tl.argmax(largest, 0), chosen)

    step = tl.arange(0, GROUP)
    token = chosen * (GROUP * GROUP) + step[:, None] * GROUP + step[None, :]
    line = logits + place.to(tl.int64) * stride
    logit = tl.load(line + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    weight = tl.exp2((logit - top) * (inverse * LOG2_E))
    group = _winner(tl.sum(weight, 1), word, 1, step)
    inside = tl.sum(tl.where(step[:, None] == group, weight, 0.0), 0)
    drawn = _winner(inside, word, 2, step)
    drawn += (chosen * GROUP + group) * GROUP
    likeliest = tl.min(tl.min(tl.where(logit == top, token, vocabulary), 1), 0)
    drawn = tl.where(is_greedy, likeliest, drawn)
    drawn = tl.minimum(drawn, vocabulary - 1)  # a row of NaN has none
    said = tl.load(line + drawn).to(tl.float32) - top
    if RAW:
        plain = tl.load(source + 2 * cells, mask=tile < tiles, other=0.0)
        plain = tl.sum(plain * tl.exp2((largest - top) * LOG2_E), 0)
        log_prob = said - tl.log2(plain) * LN_2
    else:
        log_prob = said * inverse - tl.log2(total) * LN_2
    bits = log_prob.to(tl.int32, bitcast=True)
    tl.store(out + place, drawn)
    tl.store(out + size + place, bits)
    if next_message is not None:
        reply = replies + (tl.load(next_message) + MESSAGES - 1) % MESSAGES * reply_stride + place
        tl.store(reply, drawn)
        tl.store(reply + size, bits)
    tl.store(newest + row, drawn.to(tl.int64), mask=position >= 0)
