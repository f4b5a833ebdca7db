"""The work of head.py on a chunk of logits, as one Triton kernel for each pass.

The forward kernel reads the logits once; the backward kernel reads them once and writes the
gradient over them. Rows of logits have a stride that is a multiple of 16 elements; what lies
between the vocabulary's end and the next row may be overwritten. The temperature is a float32,
beside float64 logits, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# A block of the forward kernel reads DEPTH x LANES neighbouring logits at a time. Every lane sums
# up what it reads itself, and the lanes are brought together when the row ends: within a row no
# thread waits for another. 1,024 lanes of 2 bytes are 16 bytes for each of 128 threads.
LANES = 1024
DEPTH = 4
TILE = 4096  # logits of a block of the backward kernel
# Triton is about to change its default for the second and warns where it is not said.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
# A GPU has an instruction for powers of two: exponentials are computed as such.
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def rows_forward(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    log_probs: Tensor,
    normaliser: Tensor,
    entropy: Tensor | None,
    squares: Tensor | None,
) -> None:
    """Like head.rows_forward."""
    rows, vocabulary = logits.shape
    with torch.cuda.device_of(logits):
        _forward_kernel[(rows,)](
            logits,
            labels,
            log_probs,
            normaliser,
            entropy,
            squares,
            1.0 / temperature,
            vocabulary,
            logits.stride(0),
            DEPTH=DEPTH,
            LANES=LANES,
            **OPTIONS,
        )


def rows_backward(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    normaliser: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Like head.rows_backward. The gradient takes the place of the logits."""
    rows, vocabulary = logits.shape
    with torch.cuda.device_of(logits):
        _backward_kernel[(rows, triton.cdiv(vocabulary, TILE))](
            logits,
            labels,
            normaliser,
            entropy,
            grad_log_probs,
            grad_entropy,
            1.0 / temperature,
            logits.stride(0),
            TILE=TILE,
            **OPTIONS,
        )
    return logits


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    log_probs: tl.tensor,
    normaliser: tl.tensor,
    entropy: tl.tensor,
    squares: tl.tensor,
    inverse_temperature: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    dtype = log_probs.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)  # a chunk may hold more than 2**31 logits
    logits += row * stride
    inverse_temperature = tl.cast(inverse_temperature, dtype)
    bits = inverse_temperature * LOG2_E
    # Of each lane: the largest logit; and of the exponentials of how far logits are below it, by
    # temperature, their sum, the sum of each times how far in bits, and the sum of squares. -1e30
    # stands for minus infinity, which times a weight of zero would not be zero.
    top = tl.full([LANES], -1e30, dtype)
    total = tl.zeros([LANES], dtype)
    tilted = tl.zeros([LANES], dtype)
    squared = tl.zeros([LANES], dtype)
    columns = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = vocabulary // (DEPTH * LANES) * (DEPTH * LANES)
    for start in range(0, whole, DEPTH * LANES):
        x = tl.load(logits + start + columns).to(dtype)
        top, total, tilted, squared = _absorb(x, bits, top, total, tilted, squared)
    if whole < vocabulary:
        columns += whole
        x = tl.load(logits + columns, mask=columns < stride, other=0.0).to(dtype)
        x = tl.where(columns < vocabulary, x, -1e30)
        top, total, tilted, squared = _absorb(x, bits, top, total, tilted, squared)
    highest = tl.max(top, 0)
    below = (top - highest) * bits
    scale = tl.exp2(below)
    sum_total = tl.sum(scale * total, 0)
    log_total = tl.log(sum_total)
    picked = tl.load(logits + tl.load(labels + row)).to(dtype)
    tl.store(log_probs + row, (picked - highest) * inverse_temperature - log_total)
    tl.store(normaliser + row, highest * inverse_temperature + log_total)
    if entropy is not None:
        mean = tl.sum(scale * (tilted + below * total), 0) / sum_total
        tl.store(entropy + row, log_total - mean * LN_2)
    if squares is not None:
        sum_squared = tl.sum(scale * scale * squared, 0)
        tl.store(squares + row, sum_squared / (sum_total * sum_total))


@triton.jit  # type: ignore[untyped-decorator]
def _absorb(
    x: tl.tensor,
    bits: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    tilted: tl.tensor,
    squared: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The sums of each lane with those of x (DEPTH, LANES), relative to the new largest logit."""
    highest = tl.maximum(top, tl.max(x, 0))
    fall = (top - highest) * bits
    scale = tl.exp2(fall)
    below = (x - highest[None, :]) * bits
    weight = tl.exp2(below)
    tilted = scale * (tilted + fall * total) + tl.sum(weight * below, 0)
    total = scale * total + tl.sum(weight, 0)
    squared = scale * scale * squared + tl.sum(weight * weight, 0)
    return highest, total, tilted, squared


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    normaliser: tl.tensor,
    entropy: tl.tensor,
    grad_log_probs: tl.tensor,
    grad_entropy: tl.tensor,
    inverse_temperature: tl.tensor,
    stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)  # a chunk may hold more than 2**31 logits
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    places = logits + row * stride + columns
    inside = columns < stride
    dtype = normaliser.dtype.element_ty
    inverse_temperature = tl.cast(inverse_temperature, dtype)
    x = tl.load(places, mask=inside, other=0.0).to(dtype)
    log_p = x * inverse_temperature - tl.load(normaliser + row)
    of_label = tl.load(grad_log_probs + row)
    weight = of_label
    if grad_entropy is not None:
        weight += tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    chosen = tl.where(columns == tl.load(labels + row), of_label, 0.0)
    grad = (chosen - tl.exp2(log_p * LOG2_E) * weight) * inverse_temperature
    tl.store(places, grad.to(logits.dtype.element_ty), mask=inside)
