from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from caldera.config.actor import ActorConfig
from caldera.core_algos import (
    LossScale,
    agg_loss,
    call_policy_loss,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    register_policy_loss,
)
from caldera.errors import ConfigError, RegistryError

NAN = math.nan


def actor(**keys: Any) -> ActorConfig:
    return ActorConfig(**{"clip_ratio_low": None, "clip_ratio_high": None, **keys})


def log(ratios: list[float]) -> Tensor:
    return torch.tensor([ratios]).log()


# ratio 1.5, advantage 1: clipped to -1.2     ratio 0.5, advantage -1: clipped to 0.8
# ratio 0.5, advantage 1: -0.5                ratio 4, advantage -1: 4, bounded by 3 (dual clip)
RATIOS = [1.5, 0.5, NAN, 0.5, 4.0]
ADVANTAGES = torch.tensor([[1.0, 1.0, NAN, -1.0, -1.0]])
MASK = torch.tensor([[1, 1, 0, 1, 1]])
OLD = torch.tensor([[-2.0, -2.0, NAN, -2.0, -2.0]])


def vanilla(log_prob: Tensor, config: ActorConfig, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return compute_policy_loss_vanilla(
        OLD, log_prob, ADVANTAGES, MASK, config.loss_agg_mode, config, **more
    )


def test_by_hand() -> None:
    log_prob = (OLD + log(RATIOS)).requires_grad_()
    loss, metrics = vanilla(log_prob, actor())
    assert loss.item() == pytest.approx((-1.2 - 0.5 + 0.8 + 3.0) / 4)
    assert {name: value.item() for name, value in metrics.items()} == {
        "actor/pg_clipfrac": pytest.approx(2 / 4),
        "actor/ppo_kl": pytest.approx(-math.log(1.5 * 0.5 * 0.5 * 4) / 4),
        "actor/pg_clipfrac_lower": pytest.approx(1 / 4),
    }
    assert not any(value.requires_grad for value in metrics.values())
    loss.backward()
    assert log_prob.grad is not None
    # only the second token is not clipped: d(-A r)/d(log r) = -0.5; nothing comes from the NaNs
    torch.testing.assert_close(log_prob.grad, torch.tensor([[0.0, -0.5 / 4, 0.0, 0.0, 0.0]]))


def test_an_undefined_advantage_outside_the_mask_leaves_no_trace() -> None:
    log_prob = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    undefined = torch.tensor([[1.0, NAN]])
    loss, _ = compute_policy_loss_vanilla(
        log_prob.detach(),
        log_prob,
        undefined,
        torch.tensor([[1, 0]]),
        "token-mean",
        actor(),
        rollout_is_weights=undefined,
    )
    loss.backward()
    assert loss.item() == -1.0
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [[-1.0, 0.0]]


def test_dual_clip_bound() -> None:
    loss, metrics = vanilla(OLD + log(RATIOS), actor(clip_ratio_c=5.0))
    assert loss.item() == pytest.approx((-1.2 - 0.5 + 0.8 + 4.0) / 4)
    assert metrics["actor/pg_clipfrac_lower"].item() == 0.0


def test_asymmetric_clip() -> None:
    config = actor(clip_ratio_low=0.4, clip_ratio_high=0.6)
    loss, metrics = vanilla(OLD + log(RATIOS), config)
    # 1.5 lies within 1.6 now, and 0.5 is clipped to 0.6
    assert loss.item() == pytest.approx((-1.5 - 0.5 + 0.6 + 3.0) / 4)
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(1 / 4)


def test_null_clip_ratios_follow_clip_ratio() -> None:
    log_prob = OLD + log(RATIOS)
    loss, _ = vanilla(log_prob, actor(clip_ratio=0.3))
    assert loss.item() == pytest.approx((-1.3 - 0.5 + 0.7 + 3.0) / 4)
    loss, _ = vanilla(log_prob, actor(clip_ratio=0.3, clip_ratio_low=0.0))
    assert loss.item() == pytest.approx((-1.3 - 0.5 + 1.0 + 3.0) / 4)


def test_importance_weights_multiply_the_loss() -> None:
    weights = torch.tensor([[1.0, 2.0, NAN, 0.0, 0.5]])
    loss, _ = vanilla(OLD + log(RATIOS), actor(), rollout_is_weights=weights)
    assert loss.item() == pytest.approx((-1.2 - 0.5 * 2 + 3.0 * 0.5) / 4)


def test_a_scale_makes_shares() -> None:
    scale = LossScale(batch_num_tokens=16, global_batch_size=4, dp_size=2)
    loss, metrics = vanilla(OLD + log(RATIOS), actor(), scale=scale)
    assert loss.item() == pytest.approx(2.1 * 2 / 16)
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(2 * 2 / 16)


def test_aggregation_follows_the_configuration() -> None:
    config = actor(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=7.0)
    log_prob = OLD + log(RATIOS)
    assert vanilla(log_prob, config)[0].item() == pytest.approx(2.1 / 7)
    scale = LossScale(batch_num_tokens=8, global_batch_size=2, response_length=100)
    assert vanilla(log_prob, config, scale=scale)[0].item() == pytest.approx(2.1 / 7 / 2)


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    log_prob = torch.tensor([[-0.5, -3.0]], requires_grad=True)
    advantages = torch.tensor([[2.0, -1.0]])
    loss, metrics = compute_policy_loss_vanilla(
        log_prob.detach(), log_prob, advantages, torch.ones(1, 2), "token-mean", actor()
    )
    loss.backward()
    assert loss.item() == pytest.approx(-0.5)
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [[-1.0, 0.5]]
    assert metrics["actor/ppo_kl"].item() == 0.0


def test_an_extreme_ratio_stays_finite() -> None:
    log_prob = torch.tensor([[0.0, -200.0]], requires_grad=True)
    old = torch.tensor([[-200.0, 0.0]])
    loss, metrics = compute_policy_loss_vanilla(
        old, log_prob, -torch.ones(1, 2), torch.ones(1, 2), "token-mean", actor()
    )
    loss.backward()
    assert loss.item() == pytest.approx((3.0 + 0.8) / 2)
    assert metrics["actor/ppo_kl"].item() == pytest.approx(0.0)  # (-20 + 20) / 2
    assert log_prob.grad is not None
    assert log_prob.grad.isfinite().all()


def test_no_tokens_give_zero() -> None:
    log_prob = torch.full((1, 2), NAN, requires_grad=True)
    loss, metrics = compute_policy_loss_vanilla(
        log_prob.detach(), log_prob, log_prob.detach(), torch.zeros(1, 2), "token-mean", actor()
    )
    loss.backward()
    assert loss.item() == 0.0
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [[0.0, 0.0]]
    assert [value.item() for value in metrics.values()] == [0.0, 0.0, 0.0]


def test_dual_clip_must_be_above_one() -> None:
    with pytest.raises(ConfigError, match=r"actor\.clip_ratio_c=1.0 must be greater than 1"):
        vanilla(OLD, actor(clip_ratio_c=1.0))


def test_registry() -> None:
    assert get_policy_loss_fn("vanilla") is compute_policy_loss_vanilla
    again = register_policy_loss("vanilla")(compute_policy_loss_vanilla)  # the same may
    assert again is compute_policy_loss_vanilla
    with pytest.raises(RegistryError, match="'vanilla' is registered already"):
        register_policy_loss("vanilla")(lambda: (OLD, {}))
    with pytest.raises(
        RegistryError, match=r"policy_loss.loss_mode 'vanila'; did you mean 'vanilla'\?"
    ):
        get_policy_loss_fn("vanila")


def in_verls_signature(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    losses = -advantages * log_prob
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(losses, response_mask, loss_agg_mode)
    return loss, {"actor/mine": loss.item(), "actor/tensor": loss.detach() * 2}


ROWS = [torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-5.0, NAN, NAN]])]
MASKS = [torch.tensor([[1, 1, 1]]), torch.tensor([[1, 0, 0]])]


def test_a_loss_without_scale_is_weighed_by_tokens() -> None:
    scale = LossScale(batch_num_tokens=4, global_batch_size=2, dp_size=2)
    total, totals = 0.0, {"actor/mine": 0.0, "actor/tensor": 0.0}
    for row, mask in zip(ROWS, MASKS, strict=True):
        log_prob = row.clone().requires_grad_()
        args = (row, log_prob, torch.ones(1, 3), mask, "token-mean", actor())
        loss, metrics = call_policy_loss(in_verls_signature, *args, scale=scale)
        loss.backward()
        assert log_prob.grad is not None
        torch.testing.assert_close(log_prob.grad, -mask / 4 * 2)
        total += loss.item()
        for name, value in metrics.items():
            assert not value.requires_grad
            totals[name] += value.item()
    mean = (1 + 2 + 3 + 5) / 4 * 2  # over all tokens, times dp_size
    assert total == pytest.approx(mean)
    assert totals == pytest.approx({"actor/mine": mean, "actor/tensor": 2 * mean})

    args = (ROWS[0], ROWS[0], torch.ones(1, 3), MASKS[0], "token-mean", actor())
    assert call_policy_loss(in_verls_signature, *args)[0].item() == pytest.approx(2)  # the whole
    weights = torch.tensor([[1.0, 0.0, 2.0]])
    loss, _ = call_policy_loss(in_verls_signature, *args, rollout_is_weights=weights)
    assert loss.item() == pytest.approx(7 / 3)
    classic = LossScale.classic(0.5)
    assert call_policy_loss(in_verls_signature, *args, scale=classic)[0].item() == pytest.approx(1)


def test_a_loss_with_scale_gets_it() -> None:
    scale = LossScale(batch_num_tokens=16, global_batch_size=4, dp_size=2)
    args = (OLD, OLD + log(RATIOS), ADVANTAGES, MASK, "token-mean", actor())
    assert call_policy_loss("vanilla", *args, scale=scale)[0].item() == pytest.approx(2.1 * 2 / 16)
    assert call_policy_loss("vanilla", *args)[0].item() == pytest.approx(2.1 / 4)

    def by_keyword(**arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
        assert arguments["scale"] is scale
        return compute_policy_loss_vanilla(**arguments)

    assert call_policy_loss(by_keyword, *args, scale=scale)[0].item() == pytest.approx(2.1 * 2 / 16)
    with pytest.raises(RegistryError, match="did you mean 'vanilla'"):
        call_policy_loss("vanila", *args)
