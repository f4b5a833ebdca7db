"""Lists of token ids to padded tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from caldera.errors import ConfigError, DataError

TRUNCATION_MODES = ("error", "left", "right", "middle")


def left_pad(
    rows: Sequence[Sequence[float]],
    length: int,
    pad_value: float,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Rows of at most `length` values as one (B, length) tensor, padding before the values."""
    padded = torch.full((len(rows), length), pad_value, dtype=dtype)
    for target, row in zip(padded, rows, strict=True):
        assert len(row) <= length, f"a row of {len(row)} values cannot be padded to {length}"
        target[length - len(row) :] = torch.tensor(row, dtype=dtype)
    return padded


def right_pad(
    rows: Sequence[Sequence[float]],
    length: int,
    pad_value: float,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Rows of at most `length` values as one (B, length) tensor, padding after the values."""
    padded = torch.full((len(rows), length), pad_value, dtype=dtype)
    for target, row in zip(padded, rows, strict=True):
        assert len(row) <= length, f"a row of {len(row)} values cannot be padded to {length}"
        target[: len(row)] = torch.tensor(row, dtype=dtype)
    return padded


def compute_position_ids(attention_mask: torch.Tensor) -> torch.Tensor:
    """Positions that count the attended tokens along the last dimension; 0 on left padding."""
    return (attention_mask.to(torch.int64).cumsum(dim=-1) - 1).clamp(min=0)


def truncate(ids: Sequence[int], max_length: int, mode: str) -> list[int]:
    """At most `max_length` of the ids: the tail (left), the head (right) or both ends (middle)."""
    if mode not in TRUNCATION_MODES:
        raise ConfigError(f"data.truncation={mode!r} is not one of {', '.join(TRUNCATION_MODES)}")
    if len(ids) <= max_length:
        return list(ids)
    if mode == "left":
        return list(ids[len(ids) - max_length :])
    if mode == "right":
        return list(ids[:max_length])
    if mode == "middle":
        head = max_length // 2
        return [*ids[:head], *ids[len(ids) - (max_length - head) :]]
    raise DataError(f"{len(ids)} tokens do not fit in {max_length}, and data.truncation is 'error'")
