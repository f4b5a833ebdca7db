from __future__ import annotations

import math

import pytest
import torch

from caldera.core_algos import LossScale, compute_value_loss

NAN = math.nan
# errors 1, 1, 0; clipped to 1.5, 0, 1.5 they are 0.25, 1, 2.25
VPREDS = torch.tensor([[2.0, 0.0, 3.0, NAN]])
RETURNS = torch.tensor([[1.0, 1.0, 3.0, NAN]])
VALUES = torch.tensor([[1.0, 0.2, 1.0, NAN]])
MASK = torch.tensor([[1, 1, 1, 0]])


def test_by_hand() -> None:
    vpreds = VPREDS.clone().requires_grad_()
    loss, clipfrac = compute_value_loss(vpreds, RETURNS, VALUES, MASK, 0.5, "token-mean")
    assert loss.item() == pytest.approx(0.5 * (1 + 1 + 2.25) / 3)
    assert clipfrac.item() == pytest.approx(1 / 3)
    assert not clipfrac.requires_grad
    loss.backward()
    assert vpreds.grad is not None
    # (v - return) / 3, but where the clipped error is the larger one it does not move
    torch.testing.assert_close(vpreds.grad, torch.tensor([[1 / 3, -1 / 3, 0.0, 0.0]]))


def test_a_scale_makes_shares() -> None:
    scale = LossScale(batch_num_tokens=12, global_batch_size=4, dp_size=2, response_length=10)
    loss, clipfrac = compute_value_loss(
        VPREDS, RETURNS, VALUES, MASK, 0.5, "seq-mean-token-sum-norm", scale
    )
    assert loss.item() == pytest.approx(0.5 * 4.25 / 10 * 2 / 4)
    assert clipfrac.item() == pytest.approx(2 / 12)
    loss, _ = compute_value_loss(
        VPREDS, RETURNS, VALUES, MASK, 0.5, "seq-mean-token-sum-norm", scale, loss_scale_factor=5
    )
    assert loss.item() == pytest.approx(0.5 * 4.25 / 5 * 2 / 4)


def test_no_tokens_give_zero() -> None:
    vpreds = VPREDS.clone().requires_grad_()
    loss, clipfrac = compute_value_loss(vpreds, RETURNS, VALUES, torch.zeros(1, 4), 0.5)
    loss.backward()
    assert (loss.item(), clipfrac.item()) == (0.0, 0.0)
    assert vpreds.grad is not None
    assert vpreds.grad.tolist() == [[0.0] * 4]
