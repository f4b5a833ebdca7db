"""The kernels of `exact`: each row's numbers are added up in one order, whatever its neighbours.

That is so because a kernel of PyTorch's is always called with the same shape, so that it does the
same for each row; where the number of calls differs, the rest is padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from caldera.errors import UnsupportedError
from caldera.models.exact_norm import with_plain_gradient

ROWS = 16
"""Of each matrix product. The weights are read once for so many tokens."""
CELLS = 2**14
"""That a function is applied to at a time: too few for PyTorch to split them among threads."""
VECTOR = 64
"""Cells of whole vectors: with a multiple of it, no scalar form is left for the rest."""
SUMMED = 1024
"""Cells that are added up at a time where there may be a single row."""
QUERIES = 8
"""Of each product in attention: what a decoding pads the few of a sequence to."""
KEYS = 64
"""Of each product in attention: blocks are counted from the start of the sequence."""


# ---- matrix products


def linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """values (..., K), weight (N, K); returns (..., N)."""
    if bias is not None and not values.is_cuda:
        return linear(values, weight) + bias
    product: Tensor = _Linear.apply(values, weight, bias)  # type: ignore[no-untyped-call]
    return product


def _tiled_product(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """values (R, K), weight (N, K); a bias (N,) on CUDA only."""
    if values.is_cuda:
        from caldera.models.exact_cuda import product  # Triton comes with the torch for CUDA alone

        return product(values, weight, bias)
    rows, width = values.shape
    # A copy, so that memory begins where vectors do.
    padded = values.new_zeros(-(-rows // ROWS) * ROWS, width)
    padded[:rows] = values
    out = values.new_empty(len(padded), len(weight))
    for start in range(0, len(padded), ROWS):
        tile = slice(start, start + ROWS)
        torch.mm(padded[tile], weight.t(), out=out[tile])
    return out[:rows]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, weight)
        product = _tiled_product(values.reshape(-1, values.shape[-1]), weight, bias)
        return product.view(*values.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        grad = grads[0]
        of_values = grad @ weight if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = grad.flatten(0, -2).t() @ values.flatten(0, -2)
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return of_values, of_weight, of_bias


def matmul(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    if left.shape[-1] == 1:  # nothing is added up
        return torch.matmul(left, right, out=out) if out is not None else left @ right
    if right.dim() != 2:
        raise UnsupportedError(
            "rollout.native.exact=True: this model multiplies matrices other than by weights"
        )
    if out is not None and out.is_cuda:
        from caldera.models.exact_cuda import product

        return product(left, right.t(), out=out)
    found = linear(left, right.t())
    return found if out is None else out.copy_(found)


# ---- functions of single numbers


def in_blocks(function: Callable[..., Tensor], values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if values.is_cuda:  # where there is one form only
        return function(values, *args, **kwargs)
    kwargs.pop("inplace", None)

    def plain(part: Tensor) -> Tensor:
        return function(part, *args, **kwargs)

    return with_plain_gradient(partial(_in_blocks, plain), plain, values)


def _in_blocks(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    count = values.numel()
    flat = values.new_ones(-(-count // VECTOR) * VECTOR)
    flat[:count] = values.reshape(-1)
    for start in range(0, len(flat), CELLS):
        part = flat[start : start + CELLS]
        part.copy_(function(part))
    return flat[:count].view(values.shape)


# ---- means


def mean(values: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    """That of the last dimension is taken row by row; others are not those of a model's layers."""
    is_last = dim in (-1, (-1,), [-1], values.dim() - 1)
    if not (values.is_cuda and is_last and not kwargs):
        return torch.mean(
            values, **({} if dim is None else {"dim": dim, "keepdim": keepdim}), **kwargs
        )
    from caldera.models.exact_cuda import row_means

    means = with_plain_gradient(row_means, lambda rows: torch.mean(rows, -1), values)
    return means.unsqueeze(-1) if keepdim else means


# ---- over the vocabulary


def logsumexp(values: Tensor, dim: int, *, out: Tensor | None = None) -> Tensor:
    """Of each row of values (..., V), along the last dimension."""
    assert dim in (-1, values.dim() - 1), "only rows are summed up"
    if values.is_cuda:  # only to choose tokens: log-probs are the head's, which are exact there
        return torch.logsumexp(values, dim, out=out) if out is not None else values.logsumexp(dim)
    largest = values.amax(-1, keepdim=True)
    shares = in_blocks(torch.exp, values - largest)
    shares = F.pad(shares, (0, -shares.shape[-1] % SUMMED))
    sums = shares.unflatten(-1, (-1, SUMMED)).sum(-1).sum(-1)
    total = in_blocks(torch.log, sums) + largest.squeeze(-1)
    return total if out is None else out.copy_(total)


def log_softmax(values: Tensor, dim: int | None = None, **_: Any) -> Tensor:
    return values - logsumexp(values, -1 if dim is None else dim).unsqueeze(-1)


# ---- attention: blocks that a query does not see add nothing, so their number does not matter


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In the place of `scaled_dot_product_attention`. query (S, H, Lq, D); key (S, H, Lk, D)."""
    assert not enable_gqa and dropout_p == 0.0, "no caller asks for these"
    scale = scale if scale is not None else query.shape[-1] ** -0.5
    exact = partial(_attend, mask=attn_mask, is_causal=is_causal, scale=scale)
    plain = partial(
        F.scaled_dot_product_attention, attn_mask=attn_mask, is_causal=is_causal, scale=scale
    )
    return with_plain_gradient(exact, plain, query, key, value)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    sequences, heads, queries, width = query.shape
    keys = key.shape[2]
    query = F.pad(query, (0, 0, 0, -queries % QUERIES))
    blocks = [_blocks(each) for each in (key, value)]  # (S * H, blocks, KEYS, D)
    unseen = _unseen(mask, is_causal, (query.shape[2], keys), query.device)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for start in range(0, query.shape[2], QUERIES):
        tile = slice(start, start + QUERIES)
        seen = -(-(min(start + QUERIES, keys) if is_causal else keys) // KEYS)  # blocks
        hidden = unseen[:, :, tile, : seen * KEYS]
        part = query[:, :, tile].reshape(-1, 1, QUERIES, width)  # (S * H, 1, QUERIES, D)
        attended = _attend_tile(
            part, blocks[0][:, :seen], blocks[1][:, :seen], hidden, sequences, scale
        )
        out[:, :, tile] = attended.view(sequences, heads, QUERIES, width)
    return out[:, :, :queries]


def _attend_tile(
    query: Tensor, keys: Tensor, values: Tensor, unseen: Tensor, sequences: int, scale: float
) -> Tensor:
    """query (S * H, 1, Q, D); keys and values (S * H, n, KEYS, D); returns (S * H, Q, D)."""
    count = keys.shape[1]
    scores = torch.bmm(
        query.expand(-1, count, -1, -1).flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)
    )  # (S * H * n, Q, KEYS)
    scores = scores.view(sequences, -1, count, *scores.shape[1:]).mul_(scale)
    hidden = unseen.unflatten(-1, (count, KEYS)).transpose(2, 3)  # (S or 1, H or 1, n, Q, KEYS)
    scores = scores.masked_fill_(hidden, float("-inf"))
    shares = in_blocks(torch.exp, scores - scores.amax((2, 4), keepdim=True))
    sums = shares.sum(-1).flatten(0, 1)  # (S * H, n, Q)
    products = torch.bmm(shares.flatten(0, 2), values.flatten(0, 1))
    products = products.view(-1, count, *products.shape[1:])  # (S * H, n, Q, D)
    total, normaliser = products[:, 0].clone(), sums[:, 0].clone()
    for block in range(1, count):
        total += products[:, block]
        normaliser += sums[:, block]
    return total / normaliser[..., None]


def _blocks(rows: Tensor) -> Tensor:
    """(S, H, L, D) to (S * H, blocks, KEYS, D), padded with zeros."""
    padded = F.pad(rows, (0, 0, 0, -rows.shape[2] % KEYS)).contiguous()
    return padded.view(rows.shape[0] * rows.shape[1], -1, KEYS, rows.shape[3])


def _unseen(
    mask: Tensor | None, is_causal: bool, shape: tuple[int, int], device: torch.device
) -> Tensor:
    """Which keys, padded to blocks, a query, padded to tiles, does not see: (S, H, Lq, Lk), where
    the first two may be 1. Queries of the padding see what others do: something."""
    queries, keys = shape
    width = -(-keys // KEYS) * KEYS
    places = torch.arange(width, device=device)
    if is_causal:
        return (places > torch.arange(queries, device=device)[:, None])[None, None]
    unseen = (places >= keys)[None, None, None]
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask.isneginf()
        while hidden.dim() < 4:
            hidden = hidden[None]
        hidden = F.pad(hidden, (0, width - keys), value=True)
        if hidden.shape[2] > 1:
            hidden = F.pad(hidden, (0, 0, 0, queries - hidden.shape[2]), value=False)
        unseen = unseen | hidden
    return unseen.expand(-1, -1, queries, -1)
