"""A mini-batch has one loss and one gradient, however it is cut, ordered and padded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from caldera.config.actor import ActorConfig, PolicyLossConfig
from caldera.config.rollout_correction import RolloutCorrectionConfig
from caldera.core_algos import (
    LOSS_AGG_MODES,
    POLICY_LOSSES,
    LossScale,
    agg_loss,
    compute_value_loss,
    get_policy_loss_fn,
)

Tensors = dict[str, Tensor]
# A part of a mini-batch and its scale (None: it is the whole) -> its share of loss and metrics.
Share = Callable[[Tensors, LossScale | None], tuple[Tensor, Tensors]]


def actor(loss_type: str = "ppo_clip") -> ActorConfig:
    correction = RolloutCorrectionConfig(
        bypass_mode=True,
        loss_type=loss_type,
        rollout_is="sequence",
        rollout_rs="token_k1,seq_mean_k2",
        rollout_rs_threshold="10.0,2.0",
    )
    policy_loss = PolicyLossConfig(
        clip_cov_lb=0.0,
        clip_cov_ratio=0.1,
        kl_cov_ratio=0.3,
        dro_beta=0.5,
        rollout_correction=correction,
    )
    return ActorConfig(
        clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=1.5, policy_loss=policy_loss
    )


# These choose among the tokens at hand: only a whole mini-batch has one value.
OF_THE_TOKENS_AT_HAND = ("clip_cov", "kl_cov")
POLICY_LOSS_CASES = [(name, "ppo_clip") for name in POLICY_LOSSES] + [("bypass_mode", "reinforce")]
GRAD_KEY = "predicted"


@dataclass
class Cut:
    """A mini-batch, and rows for each micro-batch of each rank, with padding for each."""

    batch: Tensors
    ranks: list[list[list[int]]]
    padding: list[tuple[int, int]]


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    rows = draw(st.integers(1, 6))
    width = draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    density = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    mask = torch.rand(rows, width, generator=generator) < density

    def random() -> Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    batch = {"mask": mask, GRAD_KEY: random(), "old": random(), "target": random()}
    order = draw(st.permutations(range(rows)))
    dp_size = draw(st.integers(1, 3))
    ranks: list[list[list[int]]] = [[[]] for _ in range(dp_size)]
    for row in order:
        micro_batches = ranks[draw(st.integers(0, dp_size - 1))]
        if draw(st.booleans()):
            micro_batches.append([])
        micro_batches[-1].append(row)
    number = sum(len(micro_batches) for micro_batches in ranks)
    pads = st.tuples(st.integers(0, 2), st.integers(0, 3))
    return Cut(batch, ranks, draw(st.lists(pads, min_size=number, max_size=number)))


def pad(values: Tensor, left: int, right: int) -> Tensor:
    fill = False if values.dtype is torch.bool else math.nan
    return torch.nn.functional.pad(values, (left, right), value=fill)


def value_and_grad(
    parts: list[Tensors], share: Share, scale: LossScale | None, leaf: Tensor
) -> tuple[Tensor, Tensors, Tensor]:
    """Sum the shares of some micro-batches, and their gradients as an optimiser would."""
    loss = torch.zeros((), dtype=torch.float64)
    totals: Tensors = {}
    leaf.grad = torch.zeros_like(leaf)
    for part in parts:
        value, metrics = share(part, scale)
        value.backward()
        loss += value.detach()
        for name, metric in metrics.items():
            totals[name] = totals.get(name, torch.zeros(())) + metric
    return loss, totals, leaf.grad


def check(cut: Cut, share: Share) -> None:
    leaf = cut.batch[GRAD_KEY].requires_grad_()
    whole_loss, whole_metrics, whole_grad = value_and_grad([cut.batch], share, None, leaf)

    scale = LossScale.from_mask(cut.batch["mask"], dp_size=len(cut.ranks))
    padding = iter(cut.padding)
    results = []
    for micro_batches in cut.ranks:
        parts = []
        for rows in micro_batches:
            left, right = next(padding)
            parts.append({key: pad(x[rows], left, right) for key, x in cut.batch.items()})
        results.append(value_and_grad(parts, share, scale, leaf))

    losses, metrics, grads = zip(*results, strict=True)
    close: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(torch.stack(losses).mean(), whole_loss, **close)
    torch.testing.assert_close(torch.stack(grads).mean(0), whole_grad, **close)
    for name, whole in whole_metrics.items():
        mean = torch.stack([rank[name] for rank in metrics]).mean()
        torch.testing.assert_close(mean, whole, check_dtype=False, **close)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(deadline=None, max_examples=50)
@given(cut=cuts())
def test_aggregation(mode: str, cut: Cut) -> None:
    def share(part: Tensors, scale: LossScale | None) -> tuple[Tensor, Tensors]:
        losses = part[GRAD_KEY].square() * part["target"]
        if scale is None:
            return agg_loss(losses, part["mask"], mode), {}
        return scale.aggregate(losses, part["mask"], mode), {}

    check(cut, share)


@pytest.mark.parametrize(("name", "loss_type"), POLICY_LOSS_CASES)
@settings(deadline=None, max_examples=30)
@given(cut=cuts(), mode=st.sampled_from(LOSS_AGG_MODES), weighed=st.booleans())
def test_policy_losses(name: str, loss_type: str, cut: Cut, mode: str, weighed: bool) -> None:
    if name in OF_THE_TOKENS_AT_HAND:
        # Two tokens have the same covariance: which is the higher is a matter of rounding.
        assume(cut.batch["mask"].sum() != 2)
        cut = in_one_micro_batch(cut)

    def share(part: Tensors, scale: LossScale | None) -> tuple[Tensor, Tensors]:
        loss, metrics = get_policy_loss_fn(name)(
            part["old"], part[GRAD_KEY], part["target"], part["mask"], mode, actor(loss_type),
            rollout_is_weights=part["old"].exp() if weighed else None, scale=scale,
        )  # fmt: skip
        # Statistics of rollout correction have maxima among them, which do not add up.
        return loss, {key: value for key, value in metrics.items() if key.startswith("actor/")}

    check(cut, share)


def in_one_micro_batch(cut: Cut) -> Cut:
    """All rows in the order of the cut, padded, on one of its ranks; the others have none."""
    rows = [row for micro_batches in cut.ranks for part in micro_batches for row in part]
    ranks: list[Any] = [[rows] if rank == 0 else [[]] for rank in range(len(cut.ranks))]
    return Cut(cut.batch, ranks, cut.padding)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(deadline=None, max_examples=30)
@given(cut=cuts())
def test_value_loss(mode: str, cut: Cut) -> None:
    def share(part: Tensors, scale: LossScale | None) -> tuple[Tensor, Tensors]:
        loss, clipfrac = compute_value_loss(
            part[GRAD_KEY], part["target"], part["old"], part["mask"], 0.5, mode, scale
        )
        return loss, {"clipfrac": clipfrac}

    check(cut, share)
