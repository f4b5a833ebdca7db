from __future__ import annotations

import math

import pytest
import torch

from caldera.config.algorithm import KLControlConfig
from caldera.core_algos import (
    KL_PENALTIES,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    get_kl_controller,
    kl_penalty,
)
from caldera.errors import ConfigError, UnsupportedError

NAN = math.nan
LN2 = math.log(2)
LOGPROB = torch.tensor([-1.0, -1.0])
REF = LOGPROB - torch.tensor([LN2, -LN2])
VALUES = {
    "kl": [LN2, -LN2],
    "abs": [LN2, LN2],
    "mse": [LN2**2 / 2, LN2**2 / 2],
    "low_var_kl": [0.5 + LN2 - 1, 2 - LN2 - 1],
    "k1": [LN2, -LN2],
    "k2": [LN2**2 / 2, LN2**2 / 2],
    "k3": [0.5 + LN2 - 1, 2 - LN2 - 1],
}
GRADS = {
    "kl": [1.0, 1.0],
    "abs": [1.0, -1.0],
    "mse": [LN2, -LN2],
    "low_var_kl": [1 - 0.5, 1 - 2.0],
}


def test_every_penalty_is_tested() -> None:
    assert tuple(VALUES) == KL_PENALTIES


@pytest.mark.parametrize(("name", "expected"), VALUES.items())
def test_values(name: str, expected: list[float]) -> None:
    assert kl_penalty(LOGPROB, REF, name).tolist() == pytest.approx(expected)
    assert kl_penalty(LOGPROB, REF, f"{name}+").tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("name", "expected"), GRADS.items())
def test_gradients(name: str, expected: list[float]) -> None:
    logprob = LOGPROB.clone().requires_grad_()
    kl_penalty(logprob, REF, name).sum().backward()
    assert logprob.grad is not None
    assert logprob.grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", VALUES)
def test_plus_has_the_gradient_of_half_the_square(name: str) -> None:
    logprob = LOGPROB.clone().requires_grad_()
    kl_penalty(logprob, REF, f"{name}+").sum().backward()
    assert logprob.grad is not None
    assert logprob.grad.tolist() == pytest.approx([LN2, -LN2])


def test_k3_is_bounded() -> None:
    difference = torch.tensor([-500.0, -4.0, 0.0, 4.0, 500.0], requires_grad=True)
    penalty = kl_penalty(difference, torch.zeros(5), "k3")
    assert penalty.tolist() == pytest.approx([10.0, 10.0, 0.0, math.exp(-4) + 3, 10.0])
    penalty.sum().backward()
    assert difference.grad is not None
    assert difference.grad.tolist() == pytest.approx([0.0, 0.0, 0.0, 1 - math.exp(-4), 0.0])


def test_full_is_not_told_from_sampled_tokens() -> None:
    with pytest.raises(UnsupportedError, match="the engine's output full_kl"):
        kl_penalty(LOGPROB, REF, "full")


@pytest.mark.parametrize("name", ["k4", "k3++", "", "+", "full+"])
def test_an_unknown_penalty_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="is not one of: kl, abs, mse, low_var_kl, k1, k2, k3"):
        kl_penalty(LOGPROB, REF, name)


@pytest.mark.parametrize(
    ("current_kl", "n_steps", "expected"),
    [
        (0.11, 10, 0.5 * 1.01),  # error 0.1
        (9.0, 10, 0.5 * 1.02),  # error bounded by 0.2
        (0.0, 10, 0.5 * 0.98),  # and by -0.2
        (0.1, 10, 0.5),
        (9.0, 100, 0.5 * 1.2),
        (0.0, 499, 0.5 * 0.002),
        (0.0, 500, 0.0),  # below 0 the penalty would become a reward
        (0.0, 9000, 0.0),
    ],
)
def test_adaptive_controller(current_kl: float, n_steps: int, expected: float) -> None:
    controller = AdaptiveKLController(init_kl_coef=0.5, target_kl=0.1, horizon=100)
    controller.update(current_kl, n_steps)
    assert controller.value == pytest.approx(expected)


def test_adaptive_controller_resumes() -> None:
    controller = AdaptiveKLController(0.5, 0.1, 100)
    controller.update(9.0, 10)
    resumed = AdaptiveKLController(0.3, 0.1, 100)
    resumed.load_state_dict(FixedKLController(0.9).state_dict())
    assert resumed.value == 0.3
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == controller.value == pytest.approx(0.51)


def test_fixed_controller() -> None:
    controller = FixedKLController(0.5)
    controller.update(9.0, 10)
    controller.load_state_dict(AdaptiveKLController(0.7, 0.1, 100).state_dict())
    assert controller.value == 0.5


def test_controllers_from_the_configuration() -> None:
    fixed = get_kl_controller(KLControlConfig(type="fixed", kl_coef=0.02))
    assert isinstance(fixed, FixedKLController)
    assert fixed.value == 0.02
    adaptive = get_kl_controller(
        KLControlConfig(type="adaptive", kl_coef=0.02, target_kl=0.3, horizon=50)
    )
    assert isinstance(adaptive, AdaptiveKLController)
    assert (adaptive.value, adaptive.target_kl, adaptive.horizon) == (0.02, 0.3, 50)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            KLControlConfig(type="adptive"),
            r"kl_ctrl\.type='adptive' is not one of: fixed, ad",
        ),
        (KLControlConfig(type="adaptive", horizon=0), r"kl_ctrl\.horizon=0 must be greater than 0"),
        (KLControlConfig(type="adaptive", target_kl=0), r"kl_ctrl\.target_kl=0 must be greater"),
    ],
)
def test_unusable_controllers(config: KLControlConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_kl_controller(config)


def test_kl_in_the_reward() -> None:
    scores = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.0]])
    old = torch.tensor([[-1.0, NAN, -1.0], [NAN, NAN, NAN]])
    ref = torch.tensor([[-1.2, NAN, -1.4], [NAN, NAN, NAN]])
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=0.1, horizon=100)
    rewards, metrics = apply_kl_penalty(scores, old, ref, mask, controller, "kl")
    expected = torch.tensor([[-0.02, 1.0, -0.04], [0.5, 0.0, 0.0]])
    torch.testing.assert_close(rewards, expected)
    assert metrics == {
        "actor/reward_kl_penalty": pytest.approx((0.3 + 0.0) / 2),  # a response without tokens: 0
        "actor/reward_kl_penalty_coeff": 0.1,
    }
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 2 / 100))


def test_kl_in_the_reward_takes_any_penalty() -> None:
    rewards, _ = apply_kl_penalty(
        torch.zeros(1, 2), LOGPROB[None], REF[None], torch.ones(1, 2), FixedKLController(2.0), "k3"
    )
    assert rewards[0].tolist() == pytest.approx([-2 * value for value in VALUES["k3"]])


def test_the_full_kl_in_the_reward() -> None:
    full_kl = torch.tensor([[0.25, NAN]])
    controller = FixedKLController(2.0)
    inputs = torch.ones(1, 2), LOGPROB[None], REF[None], torch.tensor([[1, 0]]), controller
    rewards, metrics = apply_kl_penalty(*inputs, "full", full_kl)
    assert rewards.tolist() == [[0.5, 1.0]]
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.25)
    estimated, _ = apply_kl_penalty(*inputs, "kl", full_kl)
    assert estimated[0].tolist() == pytest.approx([1 - 2 * LN2, 1.0])
    with pytest.raises(UnsupportedError, match="full_kl"):
        apply_kl_penalty(*inputs, "full")
