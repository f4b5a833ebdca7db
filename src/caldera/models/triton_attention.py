"""The step of Triton's attention kernels for a block of keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def fold_block(
    asked: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    inside: tl.tensor,
    scale: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    gathered: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take the keys and values (n, D) of a block into what was found for the queries (G, D).

    That is the largest score so far (G,), in powers of two; the sum of the shares beside it (G,);
    and the values by their shares (G, D). Keys that are not `inside` (n,) are not seen.
    """
    score = tl.dot(asked, tl.trans(keys), input_precision="ieee") * scale
    score = tl.where(inside[None, :], score, float("-inf"))
    larger = tl.maximum(largest, tl.max(score, 1))
    share = tl.exp2(score - larger[:, None])
    shrink = tl.exp2(largest - larger)
    gathered = gathered * shrink[:, None]
    gathered += tl.dot(share.to(values.dtype), values, input_precision="ieee")
    return larger, total * shrink + tl.sum(share, 1), gathered
