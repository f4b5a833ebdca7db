"""What holds for every policy loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from caldera.config.actor import ActorConfig, PolicyLossConfig
from caldera.config.rollout_correction import RolloutCorrectionConfig
from caldera.core_algos import POLICY_LOSSES, LossScale, call_policy_loss, get_policy_loss_fn

NAN = math.nan
NAMES = [
    "bypass_mode",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "gpg",
    "gspo",
    "kl_cov",
    "sapo",
    "vanilla",
]
CORRECTION: dict[str, Any] = {
    "bypass_mode": True,
    "rollout_is": "token",
    "rollout_rs": "seq_mean_k1",
    "rollout_rs_threshold": "0.5_2.0",
}
CASES = [(name, "ppo_clip") for name in NAMES] + [("bypass_mode", "reinforce")]
every_loss = pytest.mark.parametrize(
    ("name", "loss_type"), CASES, ids=lambda value: str(value).replace("ppo_clip", "")
)


def actor(loss_type: str = "ppo_clip", **keys: Any) -> ActorConfig:
    policy_loss = PolicyLossConfig(
        clip_cov_lb=0.01,
        clip_cov_ratio=0.3,
        kl_cov_ratio=0.3,
        dro_beta=0.5,
        rollout_correction=RolloutCorrectionConfig(loss_type=loss_type, **CORRECTION),
    )
    return ActorConfig(
        **{"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "policy_loss": policy_loss, **keys}
    )


def a_batch(rows: int = 4, width: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """old_log_prob, log_prob, advantages, mask (whose last row is empty)"""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator, dtype=torch.float64) - 0.5
    new = old + 0.4 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[-1] = False
    return old, new, advantages, mask


def value_and_grad(
    name: str, config: ActorConfig, batch: tuple[Tensor, ...], weights: Tensor | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    old, new, advantages, mask = batch
    log_prob = new.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        old, log_prob, advantages, mask, "token-mean", config, rollout_is_weights=weights
    )
    loss.backward()
    assert log_prob.grad is not None
    return loss.detach(), log_prob.grad, metrics


def test_the_catalogue() -> None:
    assert POLICY_LOSSES.names() == NAMES


@every_loss
def test_an_extreme_ratio_stays_finite(name: str, loss_type: str) -> None:
    old = torch.tensor([[-100.0, -100.0, 0.0, 0.0, -1.0]])
    new = torch.tensor([[0.0, 0.0, -100.0, -100.0, -1.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]])
    whole = (old, new, advantages, torch.ones(1, 5))
    # and each token by itself, so that nothing cancels out
    tokens = [tuple(x[:, at : at + 1] for x in whole) for at in range(5)]
    for batch in [whole, *tokens]:
        loss, grad, metrics = value_and_grad(name, actor(loss_type), batch)
        assert loss.isfinite()
        assert grad.isfinite().all()
        assert all(value.isfinite() for value in metrics.values()), metrics


@every_loss
def test_no_tokens_give_zero(name: str, loss_type: str) -> None:
    nothing = torch.full((2, 3), NAN)
    batch = (nothing, nothing, nothing, torch.zeros(2, 3))
    loss, grad, metrics = value_and_grad(name, actor(loss_type), batch, nothing)
    assert loss.item() == 0.0
    assert grad.tolist() == [[0.0] * 3] * 2
    assert all(value.isfinite() for value in metrics.values()), metrics
    assert {value.item() for key, value in metrics.items() if key.startswith("actor/")} <= {0.0}


@every_loss
def test_what_lies_outside_the_mask_leaves_no_trace(name: str, loss_type: str) -> None:
    old, new, advantages, mask = a_batch()
    weights = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)).double() + 0.5
    config = actor(loss_type)
    clean = value_and_grad(name, config, (old, new, advantages, mask), weights)
    assert clean[1][mask].abs().sum() > 0
    assert clean[1][~mask].abs().sum() == 0
    tensors = (old, new, advantages, weights)
    dirty = tuple(x.masked_fill(~mask, NAN) for x in tensors)
    # all at once, and each by itself: one NaN may hide behind another
    for which in [{0, 1, 2, 3}, {0}, {1}, {2}, {3}]:
        *batch, w = [dirty[i] if i in which else tensors[i] for i in range(4)]
        loss, grad, metrics = value_and_grad(name, config, (*batch, mask), w)
        assert torch.equal(loss, clean[0])
        assert torch.equal(grad, clean[1])
        torch.testing.assert_close(metrics, clean[2])


@every_loss
def test_a_row_without_tokens_changes_nothing(name: str, loss_type: str) -> None:
    batch = a_batch()
    with_it = value_and_grad(name, actor(loss_type), batch)
    without = value_and_grad(name, actor(loss_type), tuple(x[:-1] for x in batch))
    torch.testing.assert_close(with_it[0], without[0])
    torch.testing.assert_close(with_it[1][:-1], without[1])


@every_loss
def test_importance_weights_multiply_the_loss(name: str, loss_type: str) -> None:
    batch = a_batch()
    plain = value_and_grad(name, actor(loss_type), batch)
    doubled = value_and_grad(name, actor(loss_type), batch, torch.full((4, 5), 2.0).double())
    torch.testing.assert_close(doubled[0], 2 * plain[0])
    torch.testing.assert_close(doubled[1], 2 * plain[1])
    # a row's own weight is the row's alone
    of_rows = torch.tensor([[1.0], [0.0], [3.0], [1.0]]).double().expand(4, 5)
    _, grad, _ = value_and_grad(name, actor(loss_type), batch, of_rows)
    torch.testing.assert_close(grad, of_rows * plain[1])


# The others weigh by constants: what is differentiated is not what is written.
DIFFERENTIABLE = ["clip_cov", "dro", "geo_mean", "gpg", "gspo", "kl_cov", "sapo", "vanilla"]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_gradients_by_finite_differences(name: str, mode: str) -> None:
    old, new, advantages, mask = a_batch()
    if name == "gspo":  # the gradient that a token gets is exact where advantages agree
        advantages = advantages[:, :1].expand_as(old)

    def loss_of(log_prob: Tensor) -> Tensor:
        args = (old, log_prob, advantages, mask, mode, actor())
        return get_policy_loss_fn(name)(*args)[0]

    assert torch.autograd.gradcheck(loss_of, new.requires_grad_())


@pytest.mark.parametrize("name", ["bypass_mode", "cispo", "dppo_kl", "dppo_tv"])
def test_gradients_of_weighed_log_probs_are_their_weights(name: str) -> None:
    """At fixed weights the loss is linear in log-probs: it is their product with its gradient."""
    batch = a_batch()
    loss, grad, _ = value_and_grad(name, actor("reinforce"), batch)
    torch.testing.assert_close((grad * batch[1]).sum(), loss)
    assert grad.abs().sum() > 0


@every_loss
def test_metrics_are_detached_scalars_of_the_device(name: str, loss_type: str) -> None:
    _, _, metrics = value_and_grad(name, actor(loss_type), a_batch())
    common = {"actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"}
    assert {key for key in metrics if key.startswith("actor/")} == (
        set() if name == "gpg" else common
    )
    for value in metrics.values():
        assert value.shape == ()
        assert not value.requires_grad


@every_loss
def test_the_classic_scale_weighs_means_of_micro_batches(name: str, loss_type: str) -> None:
    batch, config = a_batch(), actor(loss_type)
    config.policy_loss.rollout_correction.rollout_rs = None  # it would shrink the mask at hand
    alone, _, _ = value_and_grad(name, config, batch)
    old, new, advantages, mask = batch
    loss, _ = call_policy_loss(
        name, old, new, advantages, mask, "token-mean", config, scale=LossScale.classic(0.25)
    )
    torch.testing.assert_close(loss, alone * 0.25)
