"""Log-probs and entropies of each token, without ever holding logits for all of them.

The head's logits have shape (tokens, vocabulary): for a whole batch they are by far the largest
tensor of a training step. Here they exist for some rows at a time, in the forward pass and again,
recomputed, in the backward pass. What is done to a chunk of rows between the matrix products is
PyTorch on a CPU, and one Triton kernel on CUDA.

Everything is computed in the dtype of the hidden states and summed up in float32 or better, under
torch.autocast as without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CELLS_PER_CHUNK = 2**24
"""Logits that exist at the same time on a CPU: 64 MiB in float32."""
CUDA_BYTES_PER_CHUNK = 2**30
"""The same on CUDA, in bytes. With fewer rows the matrix products no longer fill a GPU, and the
gradient of the head is read and written too often."""

HeadOutput = Literal["log_probs", "entropy", "sum_pi_squared"]
Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])


def _not_compiled(function: Wrapped) -> Wrapped:
    """torch.compile leaves it alone: nothing is left to fuse, and its loop would be unrolled."""
    left_alone: Wrapped = torch.compiler.disable(function)
    return left_alone


@_not_compiled
def head_outputs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, names: Collection[str]
) -> dict[HeadOutput, Tensor]:
    """Those of these that `names` names, each (N,), in float32 or better.

    log_probs: of the labels. entropy: of the whole distribution. sum_pi_squared: the sum of its
    squared probabilities, which has no gradient. hidden (N, H), weight (V, H), labels (N,).
    """
    with_entropy, with_squares = "entropy" in names, "sum_pi_squared" in names
    if not (with_entropy or with_squares or "log_probs" in names):
        return {}
    log_probs, entropy, squares = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, temperature, with_entropy, with_squares
    )
    found: dict[HeadOutput, Tensor] = {
        "log_probs": log_probs,
        "entropy": entropy,
        "sum_pi_squared": squares,
    }
    return {name: value for name, value in found.items() if name in names}


@_not_compiled
def full_kl(
    hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, temperature: float
) -> Tensor:
    """KL(policy || reference) of each row over the whole vocabulary, (N,), in float32 or better.

    hidden and ref_hidden (N, H), weight and ref_weight (V, H). The reference gets no gradient.
    """
    divergence: Tensor = _ChunkedKL.apply(  # type: ignore[no-untyped-call]
        hidden, weight, ref_hidden.detach(), ref_weight.detach(), temperature
    )
    return divergence


def rows_forward(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    log_probs: Tensor,
    normaliser: Tensor,
    entropy: Tensor | None,
    squares: Tensor | None,
) -> None:
    """Writes what is known of the rows of `logits` (n, V), which are before temperature.

    Into log_probs, that of the labels; normaliser, the logarithm of the sum of exponentials; and,
    unless None, entropy and squares, the sum of squared probabilities. Each (n,).
    """
    scaled = logits.to(normaliser.dtype) / temperature
    torch.logsumexp(scaled, dim=-1, out=normaliser)
    torch.sub(scaled.gather(1, labels[:, None]).squeeze(1), normaliser, out=log_probs)
    if entropy is None and squares is None:
        return
    log_p = scaled.sub_(normaliser[:, None])
    probability = torch.exp(log_p)
    if entropy is not None:
        torch.sum(log_p.mul_(probability), -1, out=entropy).neg_()
    if squares is not None:
        torch.sum(probability.square_(), -1, out=squares)


def rows_backward(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    normaliser: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """The gradient of the logits (n, V), in their dtype. It may be written over them."""
    log_p = logits.to(normaliser.dtype).div(temperature).sub_(normaliser[:, None])
    probability = torch.exp(log_p)
    grad = -probability * grad_log_probs[:, None]
    grad.scatter_add_(1, labels[:, None], grad_log_probs[:, None])
    if entropy is not None and grad_entropy is not None:
        slope = log_p.add_(entropy[:, None]).mul_(probability)
        grad -= slope.mul_(grad_entropy[:, None])
    return grad.div_(temperature).to(logits.dtype)


Forward = Callable[[Tensor, Tensor, float, Tensor, Tensor, Tensor | None, Tensor | None], None]
Backward = Callable[[Tensor, Tensor, float, Tensor, Tensor | None, Tensor, Tensor | None], Tensor]


def row_operations(hidden: Tensor) -> tuple[Forward, Backward]:
    """`rows_forward` and `rows_backward` for these hidden states."""
    if not hidden.is_cuda:
        return rows_forward, rows_backward
    from caldera.models import triton_head  # Triton comes with the torch for CUDA alone

    return triton_head.rows_forward, triton_head.rows_backward


def chunk_rows(hidden: Tensor, vocabulary: int, cell_bytes: int) -> int:
    if not hidden.is_cuda:
        return max(1, CELLS_PER_CHUNK // vocabulary)
    # Whole tiles of the matrix products.
    return max(1, CUDA_BYTES_PER_CHUNK // (vocabulary * cell_bytes) // 128) * 128


def _chunks(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _logits_by_chunk(hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their logits (n, V), always in the same memory."""
    rows, vocabulary = hidden.shape[0], weight.shape[0]
    size = chunk_rows(hidden, vocabulary, hidden.element_size())
    # A row begins at a multiple of 16 elements: else neither kernels nor products read it fast.
    width = -(-vocabulary // 16) * 16
    buffer = hidden.new_empty(min(rows, size), width)[:, :vocabulary]
    for part in _chunks(rows, size):
        logits = buffer[: part.stop - part.start]
        yield part, torch.mm(hidden[part], weight.t(), out=logits)


def _part_of(tensor: Tensor | None, part: slice) -> Tensor | None:
    return None if tensor is None else tensor[part]


def _without_autocast(hidden: Tensor) -> torch.autocast:
    """Forward and backward pass may find different states of it, and must compute alike."""
    return torch.autocast(hidden.device.type, enabled=False)


class HeadGradients:
    """Gradients of hidden states and head, gathered chunk by chunk from those of the logits."""

    def __init__(self, wanted: tuple[bool, bool], hidden: Tensor, weight: Tensor) -> None:
        self._hidden, self._dtype = hidden, weight.dtype
        self.weight = weight.to(hidden.dtype)
        self.of_hidden = hidden.new_empty(hidden.shape) if wanted[0] else None
        # In float32 or better: many chunks add up here.
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        self._of_weight = weight.new_zeros(weight.shape, dtype=dtype) if wanted[1] else None

    def add(self, part: slice, of_logits: Tensor) -> None:
        """of_logits (n, V), in the dtype of the hidden states."""
        if self.of_hidden is not None:
            torch.mm(of_logits, self.weight, out=self.of_hidden[part])
        if self._of_weight is not None:
            _add_product(self._of_weight, of_logits.t(), self._hidden[part])

    @property
    def of_weight(self) -> Tensor | None:
        return None if self._of_weight is None else self._of_weight.to(self._dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        with_entropy: bool,
        with_squares: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = hidden.new_empty(hidden.shape[0], dtype=dtype)
        normaliser = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        squares = torch.empty_like(log_probs) if with_squares else None
        labels = labels.contiguous()
        write, _ = row_operations(hidden)
        with _without_autocast(hidden):
            for part, logits in _logits_by_chunk(hidden, weight.to(hidden.dtype)):
                write(
                    logits,
                    labels[part],
                    temperature,
                    log_probs[part],
                    normaliser[part],
                    _part_of(entropy, part),
                    _part_of(squares, part),
                )
        ctx.save_for_backward(hidden, weight, labels, normaliser, entropy)
        ctx.temperature = temperature
        if squares is not None:
            ctx.mark_non_differentiable(squares)
        return log_probs, entropy, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, normaliser, entropy = ctx.saved_tensors
        # A sum's gradient is one number seen N times: kernels want N numbers.
        grad_log_probs, grad_entropy = (g if g is None else g.contiguous() for g in grads[:2])
        assert grad_log_probs is not None, "autograd fills in zeros"
        gradients = HeadGradients(ctx.needs_input_grad[:2], hidden, weight)
        _, slope = row_operations(hidden)
        with _without_autocast(hidden):
            for part, logits in _logits_by_chunk(hidden, gradients.weight):
                of_logits = slope(
                    logits,
                    labels[part],
                    ctx.temperature,
                    normaliser[part],
                    _part_of(entropy, part),
                    grad_log_probs[part],
                    _part_of(grad_entropy, part),
                )
                gradients.add(part, of_logits)
        return gradients.of_hidden, gradients.of_weight, None, None, None, None


class _ChunkedKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ref_hidden: Tensor,
        ref_weight: Tensor,
        temperature: float,
    ) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, ref_hidden.dtype)
        dtype = torch.promote_types(dtype, torch.float32)
        divergence = hidden.new_empty(hidden.shape[0], dtype=dtype)
        pairs = ((hidden, weight), (ref_hidden, ref_weight))
        with _without_autocast(hidden):
            for part, log_p, log_q in _both_by_chunk(pairs, temperature, dtype):
                divergence[part] = (log_p.exp() * log_q.neg_().add_(log_p)).sum(-1)
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, divergence)
        ctx.temperature = temperature
        return divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ref_hidden, ref_weight, divergence = ctx.saved_tensors
        gradients = HeadGradients(ctx.needs_input_grad[:2], hidden, weight)
        pairs = ((hidden, gradients.weight), (ref_hidden, ref_weight))
        with _without_autocast(hidden):
            for part, log_p, log_q in _both_by_chunk(pairs, ctx.temperature, divergence.dtype):
                # d KL / d logit = p * (log p - log q - KL): the sum of p * d log p is 0.
                slope = log_q.neg_().add_(log_p).sub_(divergence[part, None])
                slope.mul_(log_p.exp_()).mul_(grads[0][part, None] / ctx.temperature)
                gradients.add(part, slope.to(hidden.dtype))
        return gradients.of_hidden, gradients.of_weight, None, None, None


def _both_by_chunk(
    pairs: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    temperature: float,
    dtype: torch.dtype,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows and their log-probabilities (n, V): policy's and reference's."""
    (hidden, weight), (ref_hidden, ref_weight) = pairs
    weight, ref_weight = weight.to(hidden.dtype), ref_weight.to(ref_hidden.dtype)
    size = chunk_rows(hidden, weight.shape[0], 2 * dtype.itemsize)
    for part in _chunks(hidden.shape[0], size):
        log_p = _log_softmax(hidden[part] @ weight.t(), temperature, dtype)
        log_q = _log_softmax(ref_hidden[part] @ ref_weight.t(), temperature, dtype)
        yield part, log_p, log_q


def _log_softmax(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    return logits.to(dtype).div_(temperature).log_softmax(-1)
