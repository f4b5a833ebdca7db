"""Each policy loss but vanilla on a few tokens whose loss and gradient one can work out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from caldera.config.actor import ActorConfig, PolicyLossConfig
from caldera.config.rollout_correction import RolloutCorrectionConfig
from caldera.core_algos import LossScale, get_policy_loss_fn
from caldera.errors import ConfigError

NAN = math.nan
log, exp = math.log, math.exp
Rows = list[list[float]]


def actor(**keys: Any) -> ActorConfig:
    return ActorConfig(**{"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, **keys})


def tensor(rows: Rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def run(
    name: str,
    old: Rows,
    new: Rows,
    advantages: Rows,
    config: ActorConfig,
    mask: Rows | None = None,
    mode: str = "token-mean",
    weights: Rows | None = None,
    scale: LossScale | None = None,
) -> tuple[float, dict[str, float], Rows]:
    """Loss, metrics and gradient."""
    log_prob = tensor(new).requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        tensor(old),
        log_prob,
        tensor(advantages),
        torch.ones_like(log_prob) if mask is None else tensor(mask),
        mode,
        config,
        rollout_is_weights=None if weights is None else tensor(weights),
        scale=scale,
    )
    loss.backward()
    assert log_prob.grad is not None
    values = {key.removeprefix("actor/"): value.item() for key, value in metrics.items()}
    return loss.item(), values, log_prob.grad.tolist()


def near(rows: Rows) -> list[Any]:
    return [pytest.approx(row) for row in rows]


def test_cispo() -> None:
    # ratio 1.5 counts as 1.2, ratio 0.5 as 0.8, and neither loses its gradient
    old = [[-1 - log(1.5), -3 - log(0.5), -2.0]]
    loss, metrics, grad = run("cispo", old, [[-1.0, -3.0, -2.0]], [[2.0, -1.0, 1.0]], actor())
    assert loss == pytest.approx((1.2 * 2 - 0.8 * 3 + 2) / 3)
    assert grad == near([[-2.4 / 3, 0.8 / 3, -1 / 3]])
    assert metrics == pytest.approx(
        {"pg_clipfrac": 2 / 3, "ppo_kl": -log(0.75) / 3, "pg_clipfrac_lower": 0.0}
    )


# The first sequence has ratios 4 and 1, hence 2 as a whole; the second has 0.9.
GSPO_OLD = [[-3.0, -1.0, NAN], [-2.0, NAN, NAN]]
GSPO_NEW = [[-3.0 + log(4), -1.0, NAN], [-2.0 + log(0.9), NAN, NAN]]
GSPO_MASK = [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize("mode", ["token-sum", "seq-mean-token-mean"])
def test_gspo_takes_one_ratio_for_a_sequence_and_one_aggregation(mode: str) -> None:
    advantages = [[1.0, -1.0, NAN], [1.0, NAN, NAN]]
    loss, metrics, grad = run(
        "gspo", GSPO_OLD, GSPO_NEW, advantages, actor(), mask=GSPO_MASK, mode=mode
    )
    # advantage 1: -2 is clipped to -1.2; advantage -1: 2, for there is no dual clip
    assert loss == pytest.approx(((-1.2 + 2) / 2 - 0.9) / 2)
    # each token has the gradient of its own loss, whatever the rest of the sequence
    assert grad == near([[0.0, 2 / 4, 0.0], [-0.9 / 2, 0.0, 0.0]])
    assert metrics == pytest.approx(
        {"pg_clipfrac": 1 / 3, "ppo_kl": -log(4 * 0.9) / 3, "pg_clipfrac_lower": 0.0}
    )


def test_gspo_has_no_dual_clip_and_bounds_the_log_ratio_by_10() -> None:
    loss, _, grad = run("gspo", [[-6.0]], [[-1.0]], [[-1.0]], actor())
    assert loss == pytest.approx(exp(5)) and grad == near([[exp(5)]])
    loss, _, grad = run("gspo", [[-60.0]], [[-1.0]], [[-1.0]], actor())
    assert loss == pytest.approx(exp(10)) and grad == [[0.0]]


def test_geo_mean() -> None:
    config = actor(clip_ratio_low=0.2, clip_ratio_high=0.4)
    loss, metrics, grad = run(
        "geo_mean",
        old=[[-2.0, -2.0, NAN], [-2.0, -2.0, NAN], [NAN, NAN, NAN]],
        new=[[-1.0, -3.0, NAN], [-1.0, -3.0, NAN], [NAN, NAN, NAN]],
        advantages=[[1.0, 1.0, NAN], [-2.0, -2.0, NAN], [NAN, NAN, NAN]],
        config=config,
        mask=[[1, 1, 0], [1, 1, 0], [0, 0, 0]],
        mode="token-sum",  # is not read
    )
    # log-ratios 1 and -1: (0.4 - 1) / 2 for the first sequence, (1 - 0.2) / 2 for the second
    assert loss == pytest.approx((-exp(-0.3) + 2 * exp(0.4)) / 2)
    # the token that is clipped has no gradient, the other half of its sequence's
    assert grad == near(
        [[0.0, -exp(-0.3) / 2 / 2, 0.0], [2 * exp(0.4) / 2 / 2, 0.0, 0.0], [0.0, 0.0, 0.0]]
    )
    assert metrics == pytest.approx(
        {"pg_clipfrac": 1 / 4, "ppo_kl": 0.0, "pg_clipfrac_lower": 1 / 4}
    )


def test_geo_mean_of_mixed_advantages_and_weights() -> None:
    # advantages 3 and -1 have mean 1, weights 8 and 2 geometric mean 4; a weight of 0 is 0
    old, new = [[-2.0, -2.0], [-2.0, -2.0]], [[-1.9, -2.1], [-2.0, -2.0]]
    weights = [[8.0, 2.0], [0.0, 5.0]]
    advantages = [[3.0, -1.0], [1.0, 1.0]]
    loss, _, _ = run("geo_mean", old, new, advantages, actor(), weights=weights)
    assert loss == pytest.approx(-4 / 2)


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


@pytest.mark.parametrize("mode", ["token-sum", "seq-mean-token-mean"])
def test_sapo(mode: str) -> None:
    config = actor(tau_pos=1.0, tau_neg=2.0)
    old, new = [[-1.0, -1 - log(2)], [-1.0, NAN]], [[-1.0, -1.0], [-1.0, NAN]]
    advantages = [[3.0, -1.0], [-3.0, NAN]]
    loss, metrics, grad = run(
        "sapo", old, new, advantages, config, mask=[[1, 1], [1, 0]], mode=mode
    )
    gate = sigmoid(2.0)  # tau_neg (2 - 1)
    # ratio 1 is worth 2 / tau
    assert loss == pytest.approx(((-3 * 2 + gate * 2) / 2 + 3 * 1) / 2)
    # at ratio 1 the gradient is that of the policy gradient; elsewhere it fades
    assert grad == near([[-3 / 4, gate * (1 - gate) * 4 * 2 / 4], [3 / 2, 0.0]])
    assert metrics == pytest.approx(
        {"pg_clipfrac": 0.0, "ppo_kl": -log(2) / 3, "pg_clipfrac_lower": 0.0}
    )


@pytest.mark.parametrize("key", ["tau_pos", "tau_neg"])
def test_sapo_needs_positive_temperatures(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"actor_rollout_ref\.actor\.{key}=0\.0 must be > 0"):
        run("sapo", [[-1.0]], [[-1.0]], [[1.0]], actor(**{key: 0.0}))


def test_gpg() -> None:
    loss, metrics, grad = run("gpg", [[NAN, NAN]], [[-2.0, -1.0]], [[3.0, -2.0]], actor())
    assert loss == pytest.approx((6 - 2) / 2) and not metrics
    assert grad == near([[-1.5, 1.0]])


def test_dro() -> None:
    config = actor(policy_loss=PolicyLossConfig(dro_beta=2.0))
    loss, metrics, grad = run("dro", [[-2.0, -30.0]], [[-1.0, -1.0]], [[3.0, 0.0]], config)
    assert loss == pytest.approx((3 + 1 + 29**2) / 2)
    assert grad == near([[(2 * 1 - 3) / 2, 2 * 29 / 2]])  # the penalty knows no bound
    assert metrics == pytest.approx({"pg_clipfrac": 0.0, "ppo_kl": -15, "pg_clipfrac_lower": 0.0})


@pytest.mark.parametrize("beta", [None, 0.0, -1.0])
def test_dro_needs_its_beta(beta: float | None) -> None:
    config = actor(policy_loss=PolicyLossConfig(dro_beta=beta))
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.actor\.policy_loss\.dro_beta"):
        run("dro", [[-1.0]], [[-1.0]], [[1.0]], config)


# Mean advantage 0, mean log-prob -2: the tokens' covariances are 3, 1, 0 and 0.
COV_NEW = [[-1.0, -3.0, -2.0, -2.0, NAN]]
COV_ADVANTAGES = [[3.0, -1.0, -1.0, -1.0, NAN]]
COV_MASK = [[1.0, 1.0, 1.0, 1.0, 0.0]]


def covariant(name: str, first_ratio: float = 1.0, **keys: Any) -> tuple[float, dict[str, float]]:
    old = [[-1.0 - log(first_ratio), *COV_NEW[0][1:]]]
    config = actor(policy_loss=PolicyLossConfig(**keys))
    loss, metrics, _ = run(name, old, COV_NEW, COV_ADVANTAGES, config, mask=COV_MASK)
    return loss, metrics


def test_clip_cov() -> None:
    loss, metrics = covariant("clip_cov")  # between 1 and 5: only the first
    assert loss == pytest.approx(3 / 4)
    assert metrics == pytest.approx({"pg_clipfrac": 0.25, "ppo_kl": 0.0, "pg_clipfrac_lower": 0.0})
    assert covariant("clip_cov", clip_cov_ub=3.0)[0] == pytest.approx(0.0)  # none
    # all that have a covariance between, if the ratio allows: the first two
    keys = {"clip_cov_lb": 0.5, "clip_cov_ratio": 1.0}
    assert covariant("clip_cov", **keys)[0] == pytest.approx(2 / 4)


def test_clip_cov_leaves_a_token_that_is_clipped_already() -> None:
    loss, metrics = covariant("clip_cov", first_ratio=1.5)
    assert loss == pytest.approx((-3 * 1.2 + 3) / 4)
    assert metrics["pg_clipfrac"] == pytest.approx(1 / 4)


def test_clip_cov_has_no_dual_clip() -> None:
    loss, _, _ = run("clip_cov", [[-6.0]], [[-1.0]], [[-1.0]], actor())
    assert loss == pytest.approx(exp(5))


def test_clip_cov_draws_at_random_but_repeatably() -> None:
    # three tokens with covariance 2 at even places, of which one is drawn
    config = actor(policy_loss=PolicyLossConfig(clip_cov_ratio=0.2))
    before = torch.random.get_rng_state()
    drawn = set()
    for shift in range(20):
        # shifting the log-probs changes the draw, not the covariances
        new = [[x - 0.1 * shift for x in [-1.0, -3.0, -1.0, -3.0, -1.0, -3.0]]]
        advantages = [[2.0, -1.0, 2.0, -1.0, 2.0, -1.0]]
        first = run("clip_cov", new, new, advantages, config)
        assert first == run("clip_cov", new, new, advantages, config)
        gone = [place for place, slope in enumerate(first[2][0]) if slope == 0.0]
        assert len(gone) == 1
        drawn.add(gone[0])
    assert len(drawn) > 1
    assert torch.equal(torch.random.get_rng_state(), before)


def test_kl_cov() -> None:
    loss, metrics = covariant("kl_cov", first_ratio=2.0, ppo_kl_coef=0.5)
    assert loss == pytest.approx((-3 * 2 + 0.5 * log(2) + 3) / 4)
    assert metrics == pytest.approx(
        {"pg_clipfrac": 0.0, "ppo_kl": log(2) / 4, "pg_clipfrac_lower": 0.0}
    )


def test_kl_cov_holds_the_highest_only() -> None:
    old = [[-2.0, -2.0, -2.0, -2.0]]  # log-ratios 1, -1, 0, 0
    for ratio, held in {0.0: 1, 0.25: 1, 0.5: 2, 1.0: 2}.items():
        config = actor(policy_loss=PolicyLossConfig(kl_cov_ratio=ratio, ppo_kl_coef=1.0))
        new, advantages = [COV_NEW[0][:4]], [COV_ADVANTAGES[0][:4]]
        loss, metrics, _ = run("kl_cov", old, new, advantages, config)
        assert loss == pytest.approx((-3 * exp(1) + exp(-1) + 2 + held) / 4)
        assert metrics["ppo_kl"] == pytest.approx(2 / 4)  # absolute


def test_kl_cov_never_holds_what_the_mask_leaves_out() -> None:
    """Covariances of -1 are the highest if all tokens have it, though padding has 0."""
    config = actor(policy_loss=PolicyLossConfig(kl_cov_ratio=1.0, ppo_kl_coef=1.0))
    old, new, advantages = [[-2.0, -2.0, NAN]], [[-3.0, -1.0, NAN]], [[1.0, -1.0, NAN]]
    loss, _, _ = run("kl_cov", old, new, advantages, config, mask=[[1, 1, 0]])
    assert loss == pytest.approx((-exp(-1) + exp(1) + 2) / 2)


def logs(probabilities: list[float]) -> Rows:
    return [[log(p) for p in probabilities]]


def test_dppo_tv() -> None:
    config = actor(clip_ratio_low=0.1, clip_ratio_high=0.2, clip_ratio_c=3.0)
    # risen by 0.15; risen by 0.3: dropped; the same with a negative advantage; fallen by 0.2:
    # dropped; fallen by 0.05; ratio 5, cut to 3
    old = logs([0.1, 0.1, 0.1, 0.5, 0.5, 0.01])
    new = logs([0.25, 0.4, 0.4, 0.3, 0.45, 0.05])
    loss, metrics, grad = run("dppo_tv", old, new, [[1.0, 1.0, -1.0, -1.0, -1.0, 2.0]], config)
    weights = [-2.5, 0.0, 3.0, 0.0, 0.9, -6.0]
    assert loss == pytest.approx(
        sum(weight * x for weight, x in zip(weights, new[0], strict=True)) / 6
    )
    assert grad == near([[weight / 6 for weight in weights]])
    assert metrics == pytest.approx(
        {
            "pg_clipfrac": 2 / 6,
            "ppo_kl": sum(a - b for a, b in zip(old[0], new[0], strict=True)) / 6,
            "pg_clipfrac_lower": 2 / 6,  # 0.4 / 0.1 is cut too
        }
    )


def binary_kl(old: float, new: float) -> float:
    return old * log(old / new) + (1 - old) * log((1 - old) / (1 - new))


def test_dppo_kl() -> None:
    config = actor(clip_ratio_low=0.05, clip_ratio_high=0.2, clip_ratio_c=20.0)
    assert binary_kl(0.1, 0.3) < 0.2 < binary_kl(0.1, 0.4)
    assert binary_kl(0.5, 0.4) < 0.05 < binary_kl(0.5, 0.3)
    assert binary_kl(0.5, 0.1) > 0.2
    # near; far; far, but the gradient leads back; near; far; far, but back
    old = logs([0.1, 0.1, 0.1, 0.5, 0.5, 0.5])
    new = logs([0.3, 0.4, 0.4, 0.4, 0.3, 0.1])
    loss, metrics, grad = run("dppo_kl", old, new, [[1.0, 1.0, -1.0, -1.0, -1.0, 1.0]], config)
    weights = [-3.0, 0.0, 4.0, 0.8, 0.0, -0.2]
    assert loss == pytest.approx(
        sum(weight * x for weight, x in zip(weights, new[0], strict=True)) / 6
    )
    assert grad == near([[weight / 6 for weight in weights]])
    assert metrics["pg_clipfrac"] == pytest.approx(2 / 6)
    assert metrics["pg_clipfrac_lower"] == 0.0


def test_dppo_kl_at_certainty() -> None:
    """A probability of 1 has nothing left beside it: going there is infinitely far."""
    old, new = [[log(0.5), 0.0, 0.0]], [[0.0, 0.0, log(0.5)]]
    _, metrics, grad = run("dppo_kl", old, new, [[1.0, 1.0, -1.0]], actor(clip_ratio_low=0.7))
    assert metrics["pg_clipfrac"] == pytest.approx(1 / 3)
    assert grad == near([[0.0, -1 / 3, 0.5 / 3]])


# Ratios of the policy to the sampler: 1.5, 4 and 0.5; the bounds 0.4 to 3 reject the second.
BYPASS_NEW = [[-1.0, -2.0, -3.0]]
BYPASS_OLD = [[-1 - log(1.5), -2 - log(4), -3 - log(0.5)]]
REJECTION = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.4_3.0"}


def bypass(weights: Rows | None = None, scale: LossScale | None = None, **keys: Any) -> Any:
    settings = RolloutCorrectionConfig(bypass_mode=True, **keys)
    config = actor(policy_loss=PolicyLossConfig(rollout_correction=settings))
    advantages = [[1.0, 1.0, 2.0]]
    return run(
        "bypass_mode", BYPASS_OLD, BYPASS_NEW, advantages, config, weights=weights, scale=scale
    )


def test_bypass_with_ppo_clip_masks_but_does_not_weigh() -> None:
    keys: dict[str, Any] = {"rollout_is": "token", **REJECTION}
    loss, metrics, grad = bypass(loss_type="ppo_clip", **keys)
    # a rejected token still counts in the denominator
    assert loss == pytest.approx((-1.2 - 0.5 * 2) / 3)
    assert grad == near([[0.0, 0.0, -1 / 3]])
    assert metrics["pg_clipfrac"] == pytest.approx(1 / 3)
    assert metrics["ppo_kl"] == pytest.approx(-log(0.75 * 4) / 3)  # the rejected token too
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)


def test_bypass_with_reinforce_masks_and_weighs() -> None:
    keys: dict[str, Any] = {"rollout_is": "token", "rollout_is_threshold": 1.2, **REJECTION}
    loss, metrics, grad = bypass(loss_type="reinforce", **keys)
    assert loss == pytest.approx((1.2 + 0.5 * 6) / 3)
    assert grad == near([[-1.2 / 3, 0.0, -0.5 * 2 / 3]])  # the weights are constants
    assert metrics["ppo_kl"] == pytest.approx(-log(0.75 * 4) / 3)  # the rejected token too
    assert "rollout_corr/rollout_is_mean" in metrics


def test_bypass_without_correction() -> None:
    assert bypass(loss_type="reinforce")[0] == pytest.approx((1 + 2 + 6) / 3)
    assert bypass(loss_type="ppo_clip")[0] == pytest.approx((-1.2 - 1.2 - 0.5 * 2) / 3)
    assert bypass(weights=[[1.0, 0.0, 2.0]])[0] == pytest.approx((-1.2 - 0.5 * 4) / 3)


def test_bypass_metrics_are_shares() -> None:
    whole = bypass(rollout_is="token")[1]
    share = bypass(rollout_is="token", scale=LossScale(12, 4, dp_size=2))[1]
    assert share == pytest.approx({name: value * 3 * 2 / 12 for name, value in whole.items()})


def test_bypass_needs_its_settings() -> None:
    config = actor(policy_loss=PolicyLossConfig(rollout_correction=None))
    with pytest.raises(ConfigError, match=r"algorithm\.rollout_correction\.bypass_mode=true"):
        run("bypass_mode", BYPASS_OLD, BYPASS_NEW, BYPASS_NEW, config)
    with pytest.raises(ConfigError, match="loss_type='ppo': takes one of ppo_clip, reinforce"):
        bypass(loss_type="ppo")
