from __future__ import annotations

import math

import pytest
import torch

from caldera.core_algos import entropy_from_logits, entropy_from_logits_with_chunking

QUARTERS = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([0.0, math.log(3)], QUARTERS),
        ([1e5, 1e5], math.log(2)),
        ([-1e5, 1e5], 0.0),
        ([0.0, -math.inf, math.log(3)], QUARTERS),
        ([2.0, 2.0, 2.0, 2.0], math.log(4)),
    ],
)
def test_by_hand(logits: list[float], expected: float) -> None:
    tensor = torch.tensor(logits, requires_grad=True)
    entropy = entropy_from_logits(tensor)
    assert entropy.item() == pytest.approx(expected)
    entropy.backward()
    assert tensor.grad is not None
    assert tensor.grad.isfinite().all()


def test_gradient() -> None:
    logits = torch.tensor([0.0, math.log(3)], requires_grad=True)
    entropy_from_logits(logits).backward()
    assert logits.grad is not None
    # dH/dz_i = -p_i (log p_i + H)
    expected = [-p * (math.log(p) + QUARTERS) for p in (0.25, 0.75)]
    assert logits.grad.tolist() == pytest.approx(expected)


def test_half_precision_logits_are_computed_in_float32() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    entropy = entropy_from_logits(logits)
    assert entropy.dtype is torch.float32
    torch.testing.assert_close(entropy, entropy_from_logits(logits.double()).float())


@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5), (0, 5), (5,)])
@pytest.mark.parametrize("chunk_size", [1, 3, 2048])
def test_chunks_change_nothing(shape: tuple[int, ...], chunk_size: int) -> None:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    chunked = entropy_from_logits_with_chunking(logits, chunk_size)
    torch.testing.assert_close(chunked, entropy_from_logits(logits))
