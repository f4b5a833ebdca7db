from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from caldera.config.actor import LOSS_AGG_MODES as CONFIG_LOSS_AGG_MODES
from caldera.core_algos import LOSS_AGG_MODES, LossScale, agg_loss
from caldera.errors import ConfigError, ProtocolError

NAN = math.nan
# Two sequences with tokens (1, 2) and (4), and one without any.
LOSSES = torch.tensor([[1.0, NAN, 2.0], [4.0, NAN, NAN], [NAN, NAN, NAN]])
MASK = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0]])
WHOLE = {
    "token-mean": 7 / 3,
    "token-sum": 7.0,
    "seq-mean-token-sum": 7 / 2,
    "seq-mean-token-sum-norm": 7 / 2 / 3,
    "seq-mean-token-mean": (1.5 + 4) / 2,
}


def test_the_configuration_takes_the_same_modes() -> None:
    assert LOSS_AGG_MODES == CONFIG_LOSS_AGG_MODES == tuple(WHOLE)


@pytest.mark.parametrize(("mode", "expected"), WHOLE.items())
def test_modes(mode: str, expected: float) -> None:
    assert agg_loss(LOSSES, MASK, mode).item() == pytest.approx(expected)
    assert agg_loss(LOSSES, MASK.bool(), mode).item() == pytest.approx(expected)
    assert agg_loss(LOSSES, MASK.float(), mode).item() == pytest.approx(expected)


def test_the_scale_factor_replaces_the_width() -> None:
    mode = "seq-mean-token-sum-norm"
    assert agg_loss(LOSSES, MASK, mode, loss_scale_factor=10).item() == pytest.approx(0.35)
    scale = LossScale(batch_num_tokens=3, global_batch_size=2, response_length=5)
    assert scale.aggregate(LOSSES, MASK, mode).item() == pytest.approx(0.7)
    assert scale.aggregate(LOSSES, MASK, mode, 10).item() == pytest.approx(0.35)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 7 * 2 / 14),
        ("token-sum", 7 * 2),
        ("seq-mean-token-sum", 7 * 2 / 5),
        ("seq-mean-token-sum-norm", 7 * 2 / 5 / 3),
        ("seq-mean-token-mean", 5.5 * 2 / 5),
    ],
)
def test_global_counts(mode: str, expected: float) -> None:
    loss = agg_loss(LOSSES, MASK, mode, dp_size=2, batch_num_tokens=14, global_batch_size=5)
    assert loss.item() == pytest.approx(expected)
    tokens, size = torch.tensor(14), torch.tensor(5)
    counts: dict[str, Any] = {"batch_num_tokens": tokens, "global_batch_size": size}
    assert agg_loss(LOSSES, MASK, mode, dp_size=2, **counts).item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("counts", [{}, {"batch_num_tokens": 0, "global_batch_size": 0}])
def test_no_tokens_give_zero_and_a_finite_gradient(mode: str, counts: dict[str, int]) -> None:
    losses = torch.full((2, 3), NAN, requires_grad=True)
    loss = agg_loss(losses, torch.zeros(2, 3), mode, **counts)
    loss.backward()
    assert loss.item() == 0.0
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(
    ("mode", "missing"),
    [
        ("token-mean", "batch_num_tokens"),
        ("seq-mean-token-sum", "global_batch_size"),
        ("seq-mean-token-sum-norm", "global_batch_size"),
        ("seq-mean-token-mean", "global_batch_size"),
    ],
)
def test_several_ranks_need_global_counts(mode: str, missing: str) -> None:
    with pytest.raises(ProtocolError, match=f"dp_size=2 needs {missing}"):
        agg_loss(LOSSES, MASK, mode, dp_size=2)


def test_an_unknown_mode_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'token_mean' is not one of: token-mean, token-sum, seq"):
        agg_loss(LOSSES, MASK, "token_mean")


def test_counts_from_a_mask() -> None:
    scale = LossScale.from_mask(MASK, dp_size=4)
    assert (int(scale.batch_num_tokens), int(scale.global_batch_size)) == (3, 2)
    assert (scale.dp_size, scale.response_length) == (4, 3)


def test_a_share_of_a_metric_has_no_gradient() -> None:
    values = torch.tensor([[1.0, 2.0]], requires_grad=True)
    scale = LossScale(batch_num_tokens=10, global_batch_size=3)
    share = scale.token_mean(values, torch.ones(1, 2))
    assert share.item() == pytest.approx(0.3)
    assert not share.requires_grad


def test_the_share_of_a_mean() -> None:
    mean = torch.tensor(5.0, requires_grad=True)
    scale = LossScale(batch_num_tokens=12, global_batch_size=3, dp_size=2)
    share = scale.share_of_mean(mean, MASK)
    share.backward()
    assert share.item() == pytest.approx(5 * 3 / 12 * 2)
    assert mean.grad is not None
    assert mean.grad.item() == pytest.approx(3 / 12 * 2)
    assert LossScale.from_mask(MASK).share_of_mean(mean, MASK).item() == 5.0
    assert LossScale.classic(0.25).share_of_mean(mean, MASK).item() == 1.25
    assert scale.share_of_mean(mean, MASK * 0).item() == 0.0


@pytest.mark.parametrize(("mode", "expected"), WHOLE.items())
def test_the_classic_scale_is_the_matrix_alone_times_a_weight(mode: str, expected: float) -> None:
    scale = LossScale.classic(0.25)
    assert scale.aggregate(LOSSES, MASK, mode).item() == pytest.approx(expected / 4)
    assert scale.token_mean(LOSSES, MASK).item() == pytest.approx(7 / 3 / 4)


def test_the_classic_scale_knows_the_width() -> None:
    mode = "seq-mean-token-sum-norm"
    scale = LossScale.classic(1.0, response_length=7)
    assert scale.aggregate(LOSSES, MASK, mode).item() == pytest.approx(7 / 2 / 7)
    assert scale.aggregate(LOSSES, MASK, mode, 10).item() == pytest.approx(7 / 2 / 10)


def test_the_classic_scale_depends_on_the_cut() -> None:
    """Two micro-batches with means 1.5 and 4 count the same, although one has twice the tokens."""

    def of_both(scale: LossScale) -> float:
        rows = [(LOSSES[:1], MASK[:1]), (LOSSES[1:2], MASK[1:2])]
        return sum(scale.aggregate(losses, mask, "token-mean").item() for losses, mask in rows)

    assert of_both(LossScale.classic(1 / 2)) == pytest.approx((1.5 + 4) / 2)
    assert of_both(LossScale.from_mask(MASK)) == pytest.approx(7 / 3)
