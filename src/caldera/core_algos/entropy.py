"""Entropy of the next-token distribution."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["entropy_from_logits", "entropy_from_logits_with_chunking"]


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats over the last dimension, in float32 at least.

    A logit of -inf (a token that is ruled out) adds nothing, to the value and to the gradient.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_probs = logits.log_softmax(-1, dtype=dtype)
    log_probs = log_probs.clamp(min=torch.finfo(dtype).min)  # 0 * -inf would be NaN
    return -(log_probs.exp() * log_probs).sum(-1)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """The same, `chunk_size` rows at a time: without gradients, no second tensor of the logits'
    size is ever held."""
    rows = logits.reshape(-1, logits.shape[-1])  # (N, V)
    chunks = [entropy_from_logits(chunk) for chunk in torch.split(rows, chunk_size)]
    return torch.cat(chunks).view(logits.shape[:-1])
