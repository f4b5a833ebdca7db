"""Variance proxies, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from caldera.core_algos import compute_variance_proxies

NAN = math.nan
# Trajectory 0: two tokens with w = 1 - 2*0.5 + 0.5 = 0.5 and 1 - 2*0.25 + 0.25 = 0.75.
# Trajectory 1: one token with w = 1 - 2*0.8 + 0.7 = 0.1. Trajectory 2 has none.
MASK = torch.tensor([[1, 1], [1, 0], [0, 0]])
PROBS = torch.tensor([[0.5, 0.25], [0.8, NAN], [NAN, NAN]])
SUM_PI_SQUARED = torch.tensor([[0.5, 0.25], [0.7, NAN], [NAN, NAN]])
ADVANTAGES = torch.tensor([[1.0, 3.0], [-1.0, NAN], [NAN, NAN]])
WEIGHTS = torch.tensor([[2.0, 1.0], [0.5, 0.0], [0.0, 0.0]])


def proxies(
    weights: Tensor | None = None, grad_norm: Tensor | float | None = None
) -> dict[str, float]:
    found = compute_variance_proxies(
        ADVANTAGES, PROBS.log(), SUM_PI_SQUARED, MASK, weights, grad_norm
    )
    return {name.removeprefix("variance_proxy/"): value.item() for name, value in found.items()}


def test_without_a_gradient() -> None:
    assert proxies() == pytest.approx(
        {
            "proxy2_total_power": (4 * 1.25 + 1 * 0.1) / 2,
            "expected_a_squared": (4 + 1) / 2,
            "expected_w": (1.25 + 0.1) / 2,
        }
    )


@pytest.mark.parametrize("grad_norm", [0.5, torch.tensor(0.5)])
def test_signal_and_noise(grad_norm: Tensor | float) -> None:
    found = proxies(grad_norm=grad_norm)
    assert found["proxy1_signal_strength"] == pytest.approx(0.25)
    assert found["proxy3_pure_noise"] == pytest.approx((2.55 - 0.25) / (2 - 1))


def test_noise_is_not_negative() -> None:
    assert proxies(grad_norm=10.0)["proxy3_pure_noise"] == 0


def test_importance_weights_count_squared() -> None:
    found = proxies(WEIGHTS)
    assert found["expected_w"] == pytest.approx((4 * 0.5 + 0.75 + 0.25 * 0.1) / 2)
    assert found["proxy2_total_power"] == pytest.approx((4 * 2.75 + 0.025) / 2)


@pytest.mark.parametrize("rows", [0, 1])
def test_too_few_trajectories(rows: int) -> None:
    found = compute_variance_proxies(
        ADVANTAGES[:rows], PROBS[:rows].log(), SUM_PI_SQUARED[:rows], MASK[:rows], grad_norm=1.0
    )
    assert all(torch.isfinite(value) for value in found.values())
    expected = 4 * 1.25 - 1 if rows else 0
    assert found["variance_proxy/proxy3_pure_noise"].item() == pytest.approx(expected)
