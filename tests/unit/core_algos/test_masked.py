from __future__ import annotations

import math

import pytest
import torch

from caldera.core_algos import masked_mean, masked_sum, masked_var, masked_whiten, zero_outside
from caldera.errors import DataError

NAN = math.nan
VALUES = torch.tensor([[1.0, NAN, 3.0], [8.0, NAN, NAN]])
MASKS = [
    pytest.param(torch.tensor([[1, 0, 1], [1, 0, 0]], dtype=dtype), id=str(dtype))
    for dtype in (torch.bool, torch.int64, torch.float32)
]


@pytest.mark.parametrize("mask", MASKS)
def test_statistics_ignore_what_is_outside_the_mask(mask: torch.Tensor) -> None:
    assert masked_sum(VALUES, mask).item() == 12.0
    assert masked_sum(VALUES, mask, dim=-1).tolist() == [4.0, 8.0]
    assert masked_mean(VALUES, mask).item() == pytest.approx(4.0)
    assert masked_mean(VALUES, mask, dim=-1).tolist() == pytest.approx([2.0, 8.0])
    # deviations -3, -1, 4: 26 over (3 - 1)
    assert masked_var(VALUES, mask).item() == pytest.approx(13.0)


def test_an_empty_mask_has_mean_zero() -> None:
    mask = torch.tensor([[1, 1], [0, 0]])
    values = torch.tensor([[2.0, 4.0], [NAN, NAN]])
    assert masked_mean(values, mask, dim=-1).tolist() == pytest.approx([3.0, 0.0])


@pytest.mark.parametrize("kept", [0, 1])
def test_a_variance_takes_two_elements(kept: int) -> None:
    mask = torch.tensor([[kept, 0]])
    with pytest.raises(DataError, match=f"at least 2 unmasked elements, the mask keeps {kept}"):
        masked_var(torch.ones(1, 2), mask)


def test_whitening() -> None:
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]])
    whitened = masked_whiten(VALUES, mask)
    std = math.sqrt(13)
    assert whitened[mask.bool()].tolist() == pytest.approx([-3 / std, -1 / std, 4 / std])


def test_whitening_equal_values_gives_zeros() -> None:
    assert masked_whiten(torch.full((2, 2), 0.25), torch.ones(2, 2)).tolist() == [[0, 0], [0, 0]]


def test_no_gradient_leaks_from_outside_the_mask() -> None:
    values = torch.tensor([4.0, 0.0], requires_grad=True)
    # The square root of 0 has an infinite gradient.
    zero_outside(values, torch.tensor([1, 0])).add(torch.tensor([0.0, 1.0])).sqrt().sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.25, 0.0]
