"""Losses of pairs, against sums written out with plain numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from caldera.core_algos import DPO_LOSSES, LossScale, bradley_terry_loss, dpo_loss
from caldera.errors import ConfigError

CHOSEN = [1.5, -0.25, 3.0, 0.5]
REJECTED = [0.5, 1.75, -2.0, 0.5]
REFERENCE_CHOSEN = [1.0, 0.5, 2.5, 0.25]
REFERENCE_REJECTED = [1.25, 1.0, -1.0, 0.25]
BETA = 0.3


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def one_dpo_loss(x: float, beta: float, smoothing: float, kind: str) -> float:
    """Of one pair whose log-ratios are x apart."""
    if kind == "sigmoid":
        right, wrong = sigmoid(beta * x), sigmoid(-beta * x)
        return -(1 - smoothing) * math.log(right) - smoothing * math.log(wrong)
    if kind == "hinge":
        return max(0.0, 1 - beta * x)
    return (x - 0.5 / beta) ** 2


def direct(**options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    reference = (tensor(REFERENCE_CHOSEN), tensor(REFERENCE_REJECTED))
    return dpo_loss(tensor(CHOSEN), tensor(REJECTED), reference, BETA, **options)


def test_bradley_terry_by_hand() -> None:
    losses, metrics = bradley_terry_loss(tensor(CHOSEN), tensor(REJECTED))
    expected = [-math.log(sigmoid(c - r)) for c, r in zip(CHOSEN, REJECTED, strict=True)]
    assert losses.tolist() == pytest.approx(expected)
    assert metrics["accuracy"].tolist() == [1.0, 0.0, 1.0, 0.5]
    assert metrics["margin"].tolist() == [1.0, -2.0, 5.0, 0.0]
    assert metrics["chosen_score"].tolist() == CHOSEN
    assert metrics["rejected_score"].tolist() == REJECTED


def test_a_margin_is_asked_of_the_scores_and_does_not_change_what_is_told() -> None:
    margins = [0.5, 0.0, 1.0, 2.0]
    losses, metrics = bradley_terry_loss(tensor(CHOSEN), tensor(REJECTED), tensor(margins))
    pairs = zip(CHOSEN, REJECTED, margins, strict=True)
    assert losses.tolist() == pytest.approx([-math.log(sigmoid(c - r - m)) for c, r, m in pairs])
    assert metrics["margin"].tolist() == [1.0, -2.0, 5.0, 0.0]


def test_the_gradient_of_bradley_terry() -> None:
    chosen, rejected = tensor(CHOSEN).requires_grad_(), tensor(REJECTED).requires_grad_()
    losses, metrics = bradley_terry_loss(chosen, rejected)
    losses.sum().backward()
    expected = [-sigmoid(r - c) for c, r in zip(CHOSEN, REJECTED, strict=True)]
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.tolist() == pytest.approx(expected)
    assert rejected.grad.tolist() == pytest.approx([-value for value in expected])
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("kind", DPO_LOSSES)
def test_dpo_by_hand(kind: str, smoothing: float) -> None:
    losses, metrics = direct(loss_type=kind, label_smoothing=smoothing)
    four = zip(CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED, strict=True)
    apart = [(c - rc) - (r - rr) for c, r, rc, rr in four]
    assert losses.tolist() == pytest.approx([one_dpo_loss(x, BETA, smoothing, kind) for x in apart])
    assert metrics["margin"].tolist() == pytest.approx([BETA * x for x in apart])
    rewards = [BETA * (c - r) for c, r in zip(CHOSEN, REFERENCE_CHOSEN, strict=True)]
    assert metrics["chosen_reward"].tolist() == pytest.approx(rewards)
    rewards = [BETA * (c - r) for c, r in zip(REJECTED, REFERENCE_REJECTED, strict=True)]
    assert metrics["rejected_reward"].tolist() == pytest.approx(rewards)
    assert metrics["accuracy"].tolist() == [float(x > 0) for x in apart[:3]] + [0.5]
    assert metrics["chosen_log_prob"].tolist() == CHOSEN


def test_without_a_reference_all_answers_are_alike_to_it() -> None:
    losses, metrics = dpo_loss(tensor(CHOSEN), tensor(REJECTED), None, BETA)
    apart = [c - r for c, r in zip(CHOSEN, REJECTED, strict=True)]
    expected = [one_dpo_loss(x, BETA, 0.0, "sigmoid") for x in apart]
    assert losses.tolist() == pytest.approx(expected)
    assert metrics["margin"].tolist() == pytest.approx([BETA * x for x in apart])


def test_dpo_is_bradley_terry_of_its_rewards() -> None:
    losses, metrics = direct()
    same, _ = bradley_terry_loss(metrics["chosen_reward"], metrics["rejected_reward"])
    torch.testing.assert_close(losses, same)


@pytest.mark.parametrize("kind", DPO_LOSSES)
def test_the_gradient_of_dpo(kind: str) -> None:
    inputs = [tensor(v).requires_grad_() for v in (CHOSEN, REJECTED)]
    reference = (tensor(REFERENCE_CHOSEN), tensor(REFERENCE_REJECTED))
    assert torch.autograd.gradcheck(
        lambda c, r: dpo_loss(c, r, reference, BETA, 0.1, kind)[0], inputs
    )


def test_an_untrained_policy_cannot_tell() -> None:
    same = (tensor(CHOSEN), tensor(REJECTED))
    losses, metrics = dpo_loss(*same, same, BETA)
    assert losses.tolist() == pytest.approx([math.log(2)] * 4)
    assert metrics["accuracy"].tolist() == [0.5] * 4


def test_far_apart_scores_stay_finite() -> None:
    chosen = torch.tensor([-1e4, 1e4]).requires_grad_()
    losses, _ = bradley_terry_loss(chosen, -chosen.detach())
    assert losses.tolist() == [2e4, 0.0]
    losses.sum().backward()
    assert chosen.grad is not None
    assert chosen.grad.tolist() == [-1.0, 0.0]


def test_an_unknown_loss_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"loss_type='kto' is not one of: sigmoid, ipo, hinge"):
        direct(loss_type="kto")


@given(values=st.lists(st.floats(-5, 5), min_size=1, max_size=12), data=st.data())
def test_shares_of_micro_batches_and_ranks_add_up_to_the_mean(
    values: list[float], data: st.DataObject
) -> None:
    ranks = data.draw(st.integers(1, 3))
    owner = [data.draw(st.integers(0, ranks - 1)) for _ in values]
    scale = LossScale(1000, 2 * len(values), dp_size=ranks)
    total = 0.0
    for rank in range(ranks):
        own = [v for v, o in zip(values, owner, strict=True) if o == rank]
        cut = data.draw(st.integers(0, len(own)))
        parts = [tensor(part) for part in (own[:cut], own[cut:])]
        total += sum(scale.group_mean(part, 2).item() for part in parts) / ranks
    assert total == pytest.approx(sum(values) / len(values), abs=1e-9)


def test_a_mean_of_groups_in_the_classic_normalisation() -> None:
    scale = LossScale.classic(weight=0.25)
    assert scale.group_mean(tensor([2.0, 4.0]), 2).item() == pytest.approx(0.25 * 3)
