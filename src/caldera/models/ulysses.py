"""Ulysses: several ranks share the tokens of one forward pass.

Each rank holds a run of the packed tokens, and computes everything that looks at one token at a
time on these. Attention looks at all tokens, but at one head at a time: there the ranks exchange,
so that each has all tokens of some heads, and exchange back.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from caldera.errors import ConfigError
from caldera.models.attention import AttentionContext, AttentionLayer


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share the tokens of each micro-batch, and this one's place among them."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def own(self, tokens: int) -> slice:
        """This rank's run of that many tokens, which must divide."""
        share = tokens // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


ALONE = SequenceGroup()


class SharedSequences:
    """Attention over tokens of which every rank of a group holds a run."""

    def __init__(self, whole: AttentionContext, sequence: SequenceGroup) -> None:
        """`whole` attends over the tokens of all ranks."""
        self._whole = whole
        self._sequence = sequence

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # ranks talk to each other
    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        size = self._sequence.size
        if query.shape[1] % size:
            raise ConfigError(
                f"ulysses_sequence_parallel_size={size} does not divide the model's "
                f"{query.shape[1]} attention heads"
            )
        copies = size // gcd(size, key.shape[1])  # where there are fewer key heads than ranks
        if copies > 1:
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        rows = [_Exchange.apply(x, self._sequence, True) for x in (query, key, value)]  # type: ignore[no-untyped-call]
        attended = self._whole.attend(layer, *rows)
        out = _Exchange.apply(attended, self._sequence, False)  # type: ignore[no-untyped-call]
        return cast(Tensor, out)


class _Exchange(torch.autograd.Function):
    """(t, H, D) of own tokens and all heads to (T, H / size, D) of all tokens, or back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sequence: SequenceGroup, to_heads: bool) -> Tensor:
        ctx.sequence, ctx.to_heads = sequence, to_heads
        return _exchange(values, sequence, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _exchange(grads[0], ctx.sequence, not ctx.to_heads), None, None


def _exchange(values: Tensor, sequence: SequenceGroup, to_heads: bool) -> Tensor:
    tokens, heads, width = values.shape
    size = sequence.size
    if to_heads:
        parts = values.view(tokens, size, heads // size, width).transpose(0, 1).contiguous()
    else:
        parts = values.view(size, tokens // size, heads, width).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=sequence.group)
    if to_heads:
        return received.view(size * tokens, heads // size, width)
    return received.transpose(0, 1).reshape(tokens // size, size * heads, width)


def join_tokens(values: Tensor, counts: list[int], sequence: SequenceGroup) -> Tensor:
    """The values (n,) of every rank's tokens, (N,), on all ranks; n is counts[rank].

    All ranks go on to compute the same loss from them. The mean over ranks that gradients get
    counts it once for each rank, of which every one has a part of the gradient: hence the factor.
    """
    if sequence.size == 1:
        return values
    joined: Tensor = _Join.apply(values, counts, sequence)  # type: ignore[no-untyped-call]
    return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, counts: list[int], sequence: SequenceGroup) -> Tensor:
        ctx.counts, ctx.sequence = counts, sequence
        most = max(counts)  # ranks hand over equally much: not every back end takes less
        padded = values.new_zeros(most)
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=sequence.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        start = sum(ctx.counts[: ctx.sequence.rank])
        own = grads[0][start : start + ctx.counts[ctx.sequence.rank]]
        return own * ctx.sequence.size, None, None
