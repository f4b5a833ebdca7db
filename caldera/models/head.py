"""What the language head says of each token, without ever holding logits for all of them.

The head's logits have shape (tokens, vocabulary): for a whole batch they are by far the largest
tensor of a training step. Here they exist for a few rows at a time, in the forward pass and again,
recomputed, in the backward pass.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import Tensor

CELLS_PER_CHUNK = 2**24
"""Logits that exist at the same time: 64 MiB in float32."""

HeadOutput = Literal["log_probs", "entropy", "sum_pi_squared"]


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
        hidden, weight.to(hidden.dtype), labels, temperature, with_entropy, with_squares
    )
    found: dict[HeadOutput, Tensor] = {
        "log_probs": log_probs,
        "entropy": entropy,
        "sum_pi_squared": squares,
    }
    return {name: value for name, value in found.items() if name in names}


def full_kl(
    hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, temperature: float
) -> Tensor:
    """KL(policy || reference) of each row over the whole vocabulary, (N,), in float32 or better.

    hidden and ref_hidden (N, H), weight and ref_weight (V, H). The reference gets no gradient.
    """
    divergence: Tensor = _ChunkedKL.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight.to(hidden.dtype),
        ref_hidden.detach(),
        ref_weight.detach().to(ref_hidden.dtype),
        temperature,
    )
    return divergence


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(1, CELLS_PER_CHUNK // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _logits(hidden: Tensor, weight: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    return (hidden @ weight.t()).to(dtype) / temperature  # (n, V)


class _Gradients:
    """Gradients of hidden states and head, gathered chunk by chunk from those of the logits."""

    def __init__(self, ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
        self._hidden, self._weight, self._temperature = hidden, weight, ctx.temperature
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        self.of_hidden = torch.zeros_like(hidden) if want_hidden else None
        # Accumulated in float32 or better: many chunks add up here.
        self._of_weight = torch.zeros_like(weight, dtype=dtype) if want_weight else None

    def add(self, part: slice, of_logits: Tensor) -> None:
        grad = (of_logits / self._temperature).to(self._hidden.dtype)  # (n, V)
        if self.of_hidden is not None:
            self.of_hidden[part] = grad @ self._weight
        if self._of_weight is not None:
            self._of_weight += grad.t() @ self._hidden[part]

    @property
    def of_weight(self) -> Tensor | None:
        return None if self._of_weight is None else self._of_weight.to(self._weight.dtype)


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
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = torch.zeros(hidden.shape[0], dtype=dtype, device=hidden.device)
        entropy, squares = torch.zeros_like(log_probs), torch.zeros_like(log_probs)
        normaliser = torch.zeros_like(log_probs)
        for part in _chunks(hidden.shape[0], weight.shape[0]):
            logits = _logits(hidden[part], weight, temperature, dtype)
            normaliser[part] = torch.logsumexp(logits, dim=-1)
            picked = logits.gather(1, labels[part, None]).squeeze(1)
            log_probs[part] = picked - normaliser[part]
            if not (with_entropy or with_squares):
                continue
            probability = torch.exp(logits - normaliser[part, None])
            if with_entropy:
                entropy[part] = normaliser[part] - (probability * logits).sum(-1)
            if with_squares:
                squares[part] = probability.square_().sum(-1)
        ctx.save_for_backward(hidden, weight, labels, normaliser, entropy)
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        ctx.mark_non_differentiable(squares)
        return log_probs, entropy, squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy, _ = grads
        hidden, weight, labels, normaliser, entropy = ctx.saved_tensors
        gradients = _Gradients(ctx, hidden, weight, normaliser.dtype)
        for part in _chunks(hidden.shape[0], weight.shape[0]):
            logits = _logits(hidden[part], weight, ctx.temperature, normaliser.dtype)
            log_p = logits - normaliser[part, None]
            probability = torch.exp(log_p)
            grad = -probability * grad_log_probs[part, None]
            grad.scatter_add_(1, labels[part, None], grad_log_probs[part, None])
            if ctx.with_entropy:
                slope = probability * (log_p + entropy[part, None])
                grad -= slope * grad_entropy[part, None]
            gradients.add(part, grad)
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
        divergence = torch.zeros(hidden.shape[0], dtype=dtype, device=hidden.device)
        for part in _chunks(hidden.shape[0], weight.shape[0]):
            log_p = _logits(hidden[part], weight, temperature, dtype).log_softmax(-1)
            log_q = _logits(ref_hidden[part], ref_weight, temperature, dtype).log_softmax(-1)
            divergence[part] = (log_p.exp() * log_q.neg_().add_(log_p)).sum(-1)
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, divergence)
        ctx.temperature = temperature
        return divergence

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ref_hidden, ref_weight, divergence = ctx.saved_tensors
        dtype = divergence.dtype
        gradients = _Gradients(ctx, hidden, weight, dtype)
        for part in _chunks(hidden.shape[0], weight.shape[0]):
            log_p = _logits(hidden[part], weight, ctx.temperature, dtype).log_softmax(-1)
            log_q = _logits(ref_hidden[part], ref_weight, ctx.temperature, dtype).log_softmax(-1)
            # d KL / d logit = p * (log p - log q - KL): the sum of p * d log p is 0.
            slope = log_p.exp() * (log_q.neg_().add_(log_p) - divergence[part, None])
            gradients.add(part, slope * grads[0][part, None])
        return gradients.of_hidden, gradients.of_weight, None, None, None
