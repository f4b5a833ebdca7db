"""Rows of tokens: the kept ones among them, their rewards, and statistics over all of them.

A batch of 4,096 responses of 8,192 tokens takes 128 MiB a tensor. Making such a tensor costs far
more than computing it, because the system has to hand out its memory page by page. What is
independent between rows is therefore done in blocks of rows, whose intermediate tensors are small
enough to be used again and to stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from caldera.errors import DataError

_BLOCK_ELEMENTS = 2**18  # large enough for threads to share, small enough for their caches
_WHITEN_EPSILON = 1e-8


def block_height(rows: Tensor) -> int:
    """How many rows of (B, R) a block takes."""
    return max(1, _BLOCK_ELEMENTS // max(1, rows.shape[-1]))


def row_blocks(rows: Tensor) -> Iterator[slice]:
    """Slices that cut (B, R) into blocks."""
    height = block_height(rows)
    for start in range(0, len(rows), height):
        yield slice(start, start + height)


def in_row_blocks(
    function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """`function(*tensors)`, for a function that treats each row by itself.

    All tensors begin with B; the width of the first decides the size of the blocks.
    """
    outputs: tuple[Tensor, ...] = ()
    for rows in row_blocks(tensors[0]):
        parts = function(*(tensor[rows] for tensor in tensors))
        if not outputs:
            outputs = tuple(part.new_empty(len(tensors[0]), *part.shape[1:]) for part in parts)
        for output, part in zip(outputs, parts, strict=True):
            output[rows] = part
    return outputs or function(*tensors)


class KeptTokens:
    """The tokens of a mask, which can be moved to the front of their rows and back.

    A response may hold tokens that are no actions: tool tokens, turns of a user. Recursions
    over time run on the packed rows, where an action is followed by the next one.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask.bool()  # (B, R)
        gaps = self.mask[:, 1:] > self.mask[:, :-1]
        self._in_front = not gaps.count_nonzero()  # every row's tokens are: they need not move

    @cached_property
    def _slot(self) -> Tensor:
        """(B, R): where each token is in the packed row; for other positions R, beyond its end."""
        return torch.where(self.mask, self.mask.cumsum(-1) - 1, self.mask.shape[-1])

    def packed_mask(self) -> Tensor:
        if self._in_front:
            return self.mask
        places = torch.arange(self.mask.shape[-1], dtype=torch.int32, device=self.mask.device)
        return places < self.mask.sum(-1, keepdim=True, dtype=torch.int32)

    def zero_outside(self, values: Tensor) -> Tensor:
        return torch.where(self.mask, values, 0)  # faster than masked_fill

    def pack(self, values: Tensor) -> Tensor:
        """The kept values moved to the front of their rows, zeros after them."""
        if self._in_front:
            return self.zero_outside(values)
        batch, width = values.shape
        return values.new_zeros(batch, width + 1).scatter_(-1, self._slot, values)[:, :width]

    def pack_rewards(self, rewards: Tensor) -> Tensor:
        """As `pack`, but a reward outside the mask goes to the nearest earlier kept token.

        A response that ends with tool tokens has its reward there, and it belongs to the
        action before. NaN outside the mask is padding; a reward before the first action is
        nobody's.
        """
        kept = self.zero_outside(rewards)
        packed = kept if self._in_front else self.pack(kept)
        outside = (rewards - kept).abs().sum(-1)  # (B,)
        strayed = (outside != 0).nonzero().squeeze(-1)
        if len(strayed):
            packed[strayed] = _pack_stray_rewards(rewards[strayed], self.mask[strayed])
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """Back to where the tokens were, with zeros in other places; packed rows end with zeros."""
        if self._in_front:
            return packed
        return functional.pad(packed, (0, 1)).gather(-1, self._slot)


def _pack_stray_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """`KeptTokens.pack_rewards` where there are rewards outside the mask."""
    owner = mask.cumsum(-1) - 1  # (B, R): the kept token at or before each position; -1: none is
    nobodys = (rewards.isnan() & ~mask) | (owner < 0)
    owned = rewards.masked_fill(nobodys, 0)
    return torch.zeros_like(rewards).scatter_add_(-1, owner.clamp(min=0), owned)


def sum_scores(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """(B,) float64: the sum of each response's rewards, wherever they lie; NaN in padding is none.

    In float64 the mean of equal float32 scores is exact, so that a group that agrees has
    advantage 0 instead of rounding noise divided by epsilon.
    """

    def rows(rewards: Tensor, mask: Tensor) -> tuple[Tensor]:
        sums = rewards.sum(-1, dtype=torch.float64)
        if sums.isnan().any():
            padding = rewards.isnan() & ~mask.bool()
            sums = rewards.masked_fill(padding, 0).sum(-1, dtype=torch.float64)
        return (sums,)

    return in_row_blocks(rows, token_level_rewards, response_mask)[0]


def count_tokens(response_mask: Tensor) -> Tensor:
    """(B,): the kept tokens of each response."""
    return in_row_blocks(lambda mask: (mask.bool().sum(-1),), response_mask)[0]


def spread(per_response: Tensor, response_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, R): the number of each response on all of its kept tokens, zero on the others."""

    def rows(mask: Tensor, numbers: Tensor) -> tuple[Tensor]:
        return (torch.where(mask.bool(), numbers.unsqueeze(-1), 0),)

    return in_row_blocks(rows, response_mask, per_response.to(dtype))[0]


def whiten_responses(per_response: Tensor, counts: Tensor) -> Tensor:
    """(B,): the numbers after whitening, where each stands on all tokens of its response."""
    mean, scale = Moments(counts, per_response, torch.zeros_like(per_response)).whitening()
    return (per_response - mean) * scale


def whiten_in_place(values: Tensor, mask: Tensor, moments: Moments) -> Tensor:
    """`masked_whiten`, with zeros outside the mask; `moments` are those of the values."""
    mean, scale = moments.whitening()
    nothing = values.new_zeros(())
    for rows in row_blocks(values):
        whitened = values[rows].sub_(mean).mul_(scale)
        torch.where(mask[rows], whitened, nothing, out=whitened)
    return values


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations of each row's kept values, as (B,)."""

    counts: Tensor
    means: Tensor
    squares: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Moments:
        """Of values that are zero outside the mask."""
        counts = mask.sum(-1)
        means = values.sum(-1) / counts.clamp(min=1)
        deviations = torch.where(mask, values - means.unsqueeze(-1), 0)
        return cls(counts, means.double(), deviations.square_().sum(-1).double())

    def whitening(self) -> tuple[float, float]:
        """The mean of all values, and one over their standard deviation."""
        count = int(self.counts.sum())
        if count <= 1:
            raise DataError(f"whitening needs at least 2 unmasked tokens, the mask keeps {count}")
        mean = (self.counts * self.means).sum() / count
        between = self.counts * (self.means - mean).square()
        variance = (self.squares + between).sum() / (count - 1)
        return mean.item(), torch.rsqrt(variance + _WHITEN_EPSILON).item()
