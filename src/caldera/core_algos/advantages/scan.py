"""Discounted sums from the end of a response to its beginning."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

_float_range = partial(torch.arange, dtype=torch.float64)  # powers of integers are float32
_CHUNK = 32  # tokens that one product with a matrix of powers sums up


def reverse_scan(addends: Tensor, decay: float) -> Tensor:
    """y_t = addend_t + decay * y_{t+1} along the last dimension of (B, T), zero beyond the end.

    No loop over tokens: every chunk is summed by a product with a triangular matrix of powers,
    then the first sums of the chunks are scanned in the same way, with the decay of a chunk, and
    each chunk adds what comes after it. Powers of a decay in [0, 1] never overflow, so that this
    is exact to rounding for every decay.
    """
    if decay == 1:
        return addends.flip(-1).cumsum(-1).flip(-1)
    batch, width = addends.shape
    if width <= _CHUNK:
        return addends @ _powers(width, decay, addends)
    if short := -width % _CHUNK:
        addends = functional.pad(addends, (0, short))
    chunks = addends.reshape(batch, -1, _CHUNK)  # (B, N, C)
    sums = chunks @ _powers(_CHUNK, decay, addends)
    firsts = reverse_scan(sums[:, :, 0], decay**_CHUNK)  # (B, N), whole sums
    following = functional.pad(firsts[:, 1:], (0, 1)).unsqueeze(-1)  # (B, N, 1)
    distance = _float_range(_CHUNK, 0, -1, device=addends.device)  # to the next chunk's first
    sums.addcmul_(following, (decay**distance).to(addends.dtype))
    return sums.view(batch, -1)[:, :width]


def _powers(size: int, decay: float, like: Tensor) -> Tensor:
    """(T, T): what place j adds to the sum at place i, decay^(j - i), in row j and column i."""
    places = _float_range(size, device=like.device)
    distance = places.unsqueeze(-1) - places
    return (decay ** distance.clamp(min=0)).tril().to(like.dtype)
