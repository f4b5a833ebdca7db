from __future__ import annotations

import pytest
import torch

from caldera.data import compute_position_ids, left_pad, right_pad, truncate
from caldera.errors import ConfigError, DataError


def test_left_pad_puts_the_values_at_the_end() -> None:
    padded = left_pad([[1, 2], [], [3, 4, 5]], 3, 9)
    assert padded.dtype == torch.int64
    assert padded.tolist() == [[9, 1, 2], [9, 9, 9], [3, 4, 5]]


def test_right_pad_puts_the_values_at_the_start_and_takes_floats() -> None:
    padded = right_pad([[0.5], []], 2, 0.0, dtype=torch.float32)
    assert padded.dtype == torch.float32
    assert padded.tolist() == [[0.5, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("pad", [left_pad, right_pad])
def test_a_row_that_is_too_long_is_never_cut_silently(pad: object) -> None:
    with pytest.raises(AssertionError, match="3 values cannot be padded to 2"):
        pad([[1, 2, 3]], 2, 0)  # type: ignore[operator]


def test_position_ids_count_the_attended_tokens() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]])
    assert compute_position_ids(mask).tolist() == [[0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 1, 1]]
    assert compute_position_ids(mask.bool()).dtype == torch.int64


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("left", [3, 4, 5, 6, 7]), ("right", [1, 2, 3, 4, 5]), ("middle", [1, 2, 5, 6, 7])],
)
def test_truncate_modes(mode: str, expected: list[int]) -> None:
    assert truncate([1, 2, 3, 4, 5, 6, 7], 5, mode) == expected


@pytest.mark.parametrize("mode", ["error", "left", "right", "middle"])
def test_truncate_leaves_what_fits(mode: str) -> None:
    assert truncate([1, 2, 3], 3, mode) == [1, 2, 3]


@pytest.mark.parametrize("mode", ["left", "right", "middle"])
def test_truncate_to_nothing(mode: str) -> None:
    assert truncate([1, 2, 3], 0, mode) == []


def test_truncate_errors() -> None:
    with pytest.raises(DataError, match="3 tokens do not fit in 2"):
        truncate([1, 2, 3], 2, "error")
    with pytest.raises(ConfigError, match="'top' is not one of error, left, right, middle"):
        truncate([1], 2, "top")
