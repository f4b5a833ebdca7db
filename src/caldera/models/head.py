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
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

CELLS_PER_CHUNK = 2**24
"""Logits that exist at the same time on a CPU: 64 MiB in float32."""
CUDA_BYTES_PER_CHUNK = 2**30
"""The same on CUDA, in bytes. With fewer rows the matrix products no longer fill a GPU, and the
gradient of the head is read and written too often."""

NOWHERE = -1e30
"""The logit of a word that does not exist, and stands for the labels of other ranks. It is finite:
zero times infinity is no number."""

HeadOutput = Literal["log_probs", "entropy", "sum_pi_squared"]
Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])


def _not_compiled(function: Wrapped) -> Wrapped:
    """torch.compile leaves it alone: nothing is left to fuse, and its loop would be unrolled."""
    left_alone: Wrapped = torch.compiler.disable(function)
    return left_alone


@dataclass(frozen=True)
class VocabularyPart:
    """The run of the vocabulary that this rank has, of several that share it."""

    start: int
    size: int
    """Words; rows of the weight beyond these are padding."""
    group: dist.ProcessGroup


@_not_compiled
def head_outputs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    names: Collection[str],
    part: VocabularyPart | None = None,
) -> dict[HeadOutput, Tensor]:
    """Those of these that `names` names, each (N,), in float32 or better.

    log_probs: of the labels. entropy: of the whole distribution. sum_pi_squared: the sum of its
    squared probabilities, which has no gradient. hidden (N, H), weight (V, H), labels (N,).

    `part`: the weight is that of these words alone. Hidden states and outputs are the same on all
    ranks; each gets the gradient that comes from its own words, so that these have to be added up.
    """
    with_entropy, with_squares = "entropy" in names, "sum_pi_squared" in names
    if not (with_entropy or with_squares or "log_probs" in names):
        return {}
    log_probs, entropy, squares = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, temperature, with_entropy, with_squares, part
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


def _logits_by_chunk(
    hidden: Tensor, weight: Tensor, with_nowhere: bool
) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their logits (n, V), always in the same memory; perhaps of one word more, which does
    not exist."""
    rows, words = hidden.shape[0], weight.shape[0]
    vocabulary = words + with_nowhere
    size = chunk_rows(hidden, vocabulary, hidden.element_size())
    # A row begins at a multiple of 16 elements: else neither kernels nor products read it fast.
    width = -(-vocabulary // 16) * 16
    buffer = hidden.new_empty(min(rows, size), width)[:, :vocabulary]
    for part in _chunks(rows, size):
        logits = buffer[: part.stop - part.start]
        torch.mm(hidden[part], weight.t(), out=logits[:, :words])
        if with_nowhere:
            logits[:, words].fill_(NOWHERE)
        yield part, logits


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
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = hidden.new_empty(hidden.shape[0], dtype=dtype)
        normaliser = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        squares = torch.empty_like(log_probs) if with_squares else None
        words = len(weight)
        if part is not None:
            words, labels = part.size, labels - part.start
            is_own = (labels >= 0) & (labels < words)
            labels = torch.where(is_own, labels, words)  # the word that does not exist
        labels = labels.contiguous()
        write, _ = row_operations(hidden)
        own = weight[:words].to(hidden.dtype)
        with _without_autocast(hidden):
            for rows, logits in _logits_by_chunk(hidden, own, part is not None):
                write(
                    logits,
                    labels[rows],
                    temperature,
                    log_probs[rows],
                    normaliser[rows],
                    _part_of(entropy, rows),
                    _part_of(squares, rows),
                )
        if part is not None:
            # The label's logit after temperature, 0 where another rank has it.
            label = torch.where(is_own, log_probs + normaliser, 0.0)
            log_probs, normaliser, entropy, squares = _of_all_ranks(
                label, normaliser, entropy, squares, part.group
            )
        ctx.save_for_backward(hidden, weight, labels, normaliser, entropy)
        ctx.temperature, ctx.words, ctx.is_cut = temperature, words, part is not None
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
        gradients = HeadGradients(ctx.needs_input_grad[:2], hidden, weight[: ctx.words])
        _, slope = row_operations(hidden)
        with _without_autocast(hidden):
            for rows, logits in _logits_by_chunk(hidden, gradients.weight, ctx.is_cut):
                of_logits = slope(
                    logits,
                    labels[rows],
                    ctx.temperature,
                    normaliser[rows],
                    _part_of(entropy, rows),
                    grad_log_probs[rows],
                    _part_of(grad_entropy, rows),
                )
                gradients.add(rows, of_logits[:, : ctx.words])
        of_weight = gradients.of_weight
        if of_weight is not None and len(of_weight) < len(weight):
            of_weight = torch.cat([of_weight, of_weight.new_zeros(weight[ctx.words :].shape)])
        return gradients.of_hidden, of_weight, None, None, None, None, None


def _of_all_ranks(
    label: Tensor,
    normaliser: Tensor,
    entropy: Tensor | None,
    squares: Tensor | None,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """From label logits, normalisers, entropies and sums of squares (N,) of each rank's vocabulary
    to log-probs of the labels and the same of the whole."""
    found = torch.stack(
        [torch.zeros_like(label) if x is None else x for x in (label, normaliser, entropy, squares)]
    )
    parts = [torch.empty_like(found) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, found, group=group)
    labels, normalisers, entropies, squared = torch.stack(parts, 1)  # each (ranks, N)
    whole = torch.logsumexp(normalisers, 0)
    share = torch.exp(normalisers - whole)  # of each rank's vocabulary in all probability
    if entropy is not None:  # a rank's is its normaliser less its mean logit
        entropy = whole - (share * (normalisers - entropies)).sum(0)
    if squares is not None:
        squares = (share.square() * squared).sum(0)
    return labels.sum(0) - whole, whole, entropy, squares


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
