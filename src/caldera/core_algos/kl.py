"""The distance to the reference policy: per-token estimates, and its use in the reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from caldera.core_algos.aggregation import masked_mean, zero_outside
from caldera.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from caldera.config.algorithm import KLControlConfig


def _low_variance(difference: Tensor) -> Tensor:
    """e^-d + d - 1: unbiased like d, never negative, and less noisy."""
    exponent = (-difference).clamp(-20, 20)
    return (exponent.exp() - exponent - 1).clamp(-10, 10)


_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": lambda difference: difference,
    "abs": torch.abs,
    "mse": lambda difference: 0.5 * difference.square(),
    "low_var_kl": _low_variance,
}
_ALIASES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}

KL_PENALTIES = (*_ESTIMATES, *_ALIASES)
"""Estimates from the sampled tokens; each may be followed by `+`."""


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """An estimate of KL(policy || reference) from the log-probabilities of sampled tokens.

    A trailing `+` keeps the estimate's value and gives it the gradient of half the squared
    difference, whose expectation is the gradient of the KL itself.
    """
    difference = logprob - ref_logprob
    if kl_penalty == "full":
        raise UnsupportedError(
            "kl_penalty='full' is a sum over the whole vocabulary and cannot be told from the"
            " log-probabilities of sampled tokens: it is the engine's output full_kl; estimates"
            f" from sampled tokens are: {', '.join(KL_PENALTIES)}"
        )
    name = kl_penalty.removesuffix("+")
    name = _ALIASES.get(name, name)
    if name not in _ESTIMATES:
        raise ConfigError(
            f"kl_penalty={kl_penalty!r} is not one of: {', '.join(KL_PENALTIES)},"
            " each with an optional trailing '+', or full"
        )
    estimate = _ESTIMATES[name](difference)
    if not kl_penalty.endswith("+"):
        return estimate
    surrogate = 0.5 * difference.square()
    return estimate.detach() + (surrogate - surrogate.detach())


_per_token_kl = kl_penalty  # for where an argument is called kl_penalty, too


class KLController(Protocol):
    """Holds the coefficient of the KL penalty in the reward."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class FixedKLController:
    """A constant coefficient. It has no state: on resuming, the configuration's value holds."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        pass

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        pass


class AdaptiveKLController:
    """Raises the coefficient while the KL is above its target and lowers it below, by at most a
    fifth every `horizon` samples. An update of many times `horizon` samples may bring it down to
    0, where it stays, but not below."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        for key, number in (("target_kl", target_kl), ("horizon", horizon)):
            if number <= 0:
                raise ConfigError(f"algorithm.kl_ctrl.{key}={number} must be greater than 0")
        self.value = init_kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= max(0.0, 1 + error * n_steps / self.horizon)

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        # The state of a run whose controller was fixed holds nothing: start from the configuration.
        self.value = state.get("value", self.value)


def get_kl_controller(kl_ctrl: KLControlConfig) -> KLController:
    """The controller that `algorithm.kl_ctrl` describes."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise ConfigError(f"algorithm.kl_ctrl.type={kl_ctrl.type!r} is not one of: fixed, adaptive")


@torch.no_grad()
def apply_kl_penalty(
    token_level_scores: Tensor,  # (B, R), as are all tensors here
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    controller: KLController,
    kl_penalty: str,
    full_kl: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Scores less coefficient * KL: (token_level_rewards, metrics); then update the controller.

    `full_kl` is the KL over the whole vocabulary, for kl_penalty=full. The metrics hold the KL,
    averaged over each response and then over the batch, and the coefficient that was applied.
    """
    if kl_penalty == "full" and full_kl is not None:
        kl = full_kl
    else:
        kl = _per_token_kl(old_log_probs, ref_log_prob, kl_penalty)
    kl = zero_outside(kl, response_mask)
    coefficient = controller.value
    current_kl = masked_mean(kl, response_mask, dim=-1).mean().item()
    controller.update(current_kl, n_steps=len(token_level_scores))
    metrics = {
        "actor/reward_kl_penalty": current_kl,
        "actor/reward_kl_penalty_coeff": coefficient,
    }
    return token_level_scores - coefficient * kl, metrics
