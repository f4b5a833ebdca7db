"""Log-probability and entropy of labels, without ever holding logits for all tokens.

The head's logits have shape (tokens, vocabulary): for a whole batch they are by far the largest
tensor of a training step. Here they exist for a few rows at a time, in the forward pass and again,
recomputed, in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CELLS_PER_CHUNK = 2**24
"""Logits that exist at the same time: 64 MiB in float32."""


def log_prob_and_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of each distribution, both (N,), in float32 or better.

    hidden (N, H), weight (V, H), labels (N,). Without `with_entropy` the second is zeros.
    """
    log_prob, entropy = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden, weight.to(hidden.dtype), labels, temperature, with_entropy
    )
    return log_prob, entropy


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(1, CELLS_PER_CHUNK // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        rows, vocabulary = hidden.shape[0], weight.shape[0]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_prob = torch.zeros(rows, dtype=dtype, device=hidden.device)
        entropy = torch.zeros_like(log_prob)
        normaliser = torch.zeros_like(log_prob)
        for part in _chunks(rows, vocabulary):
            logits = (hidden[part] @ weight.t()).to(dtype) / temperature  # (n, V)
            normaliser[part] = torch.logsumexp(logits, dim=-1)
            picked = logits.gather(1, labels[part, None]).squeeze(1)
            log_prob[part] = picked - normaliser[part]
            if with_entropy:
                probability = torch.exp(logits - normaliser[part, None])
                entropy[part] = normaliser[part] - (probability * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, labels, normaliser, entropy)
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_prob, grad_entropy = grads
        hidden, weight, labels, normaliser, entropy = ctx.saved_tensors
        want_hidden, want_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        grad_hidden = torch.zeros_like(hidden) if want_hidden else None
        # Accumulated in float32 or better: many chunks add up here.
        grad_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if want_weight else None
        for part in _chunks(hidden.shape[0], weight.shape[0]):
            logits = (hidden[part] @ weight.t()).to(normaliser.dtype) / ctx.temperature  # (n, V)
            log_p = logits - normaliser[part, None]
            probability = torch.exp(log_p)
            grad = -probability * grad_log_prob[part, None]
            grad.scatter_add_(1, labels[part, None], grad_log_prob[part, None])
            if ctx.with_entropy:
                slope = probability * (log_p + entropy[part, None])
                grad -= slope * grad_entropy[part, None]
            grad = (grad / ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[part]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None
