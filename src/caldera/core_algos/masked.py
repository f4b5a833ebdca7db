"""Statistics over the elements that a mask keeps.

A mask is 0/1 of any dtype and of the shape of its values. What lies outside it is never read,
so that padding may hold anything, NaN included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from caldera.errors import DataError

_EPS = 1e-8


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """The values where the mask is 1, zero elsewhere; neither values nor gradients leak through."""
    return values.masked_fill(~mask.bool(), 0)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    return zero_outside(values, mask).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over (count + 1e-8): an empty mask has mean 0."""
    return masked_sum(values, mask, dim) / (mask.bool().sum(dim) + _EPS)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """The unbiased variance; it takes two elements at least."""
    count = int(mask.bool().sum())
    if count <= 1:
        raise DataError(f"a variance needs at least 2 unmasked elements, the mask keeps {count}")
    return masked_sum((values - masked_mean(values, mask)).square(), mask) / (count - 1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale all values so that those in the mask have mean 0 and variance 1."""
    scale = torch.rsqrt(masked_var(values, mask) + _EPS)
    return (values - masked_mean(values, mask)) * scale


# ---- Entropy of the next-token distribution


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
