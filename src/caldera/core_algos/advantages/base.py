"""How an estimator is registered, found and called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from caldera.config.estimators import AdvantageEstimator, declare_needs, needs_of
from caldera.errors import CalderaError, ConfigError, ProtocolError
from caldera.registry import Registry

if TYPE_CHECKING:
    from caldera.config.algorithm import AlgorithmConfig

AdvantageEstimatorFn = Callable[..., tuple[Tensor, Tensor]]
Uids = np.ndarray[Any, Any] | Sequence[Hashable] | Tensor

ADV_ESTIMATORS: Registry[AdvantageEstimatorFn] = Registry("algorithm.adv_estimator")


def register_adv_est(
    name: str | Enum, needs: Collection[str] = ()
) -> Callable[[AdvantageEstimatorFn], AdvantageEstimatorFn]:
    """Decorate an estimator to make it a value of `algorithm.adv_estimator`.

    `needs` are some of `caldera.config.estimators.NEEDS`, such as "critic" or "groups", which the
    run then has. Those of the estimators that come with Caldera stand there.
    """
    plain = _plain(name)

    def register(estimator: AdvantageEstimatorFn) -> AdvantageEstimatorFn:
        ADV_ESTIMATORS.register(plain)(estimator)
        if plain not in list(AdvantageEstimator):
            declare_needs(plain, needs)
        estimator.needs = needs_of(plain)  # type: ignore[attr-defined]  # for other names of it
        return estimator

    return register


def get_adv_estimator_fn(name: str | Enum) -> AdvantageEstimatorFn:
    return ADV_ESTIMATORS[_plain(name)]


def _plain(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """The tensors that a batch offers to an estimator; None stands for one that it lacks."""

    token_level_rewards: Tensor  # (B, R)
    response_mask: Tensor  # (B, R)
    index: Uids | None = None  # (B,): samples of one prompt share a uid
    values: Tensor | None = None  # (B, R), of the critic
    reward_baselines: Tensor | None = None  # (B,), of greedy responses
    sum_pi_squared: Tensor | None = None  # (B, R): the policy's sum of squared probabilities
    old_log_probs: Tensor | None = None  # (B, R)
    rollout_is_weights: Tensor | None = None  # (B, R), of rollout correction
    non_tensor_batch: Mapping[str, np.ndarray[Any, Any]] | None = None
    batch: Mapping[str, Tensor] | None = None


# An optional input that an estimator may miss: the kind of mistake, and what provides it.
_ORIGINS: dict[str, tuple[type[CalderaError], str]] = {
    "index": (ProtocolError, "index, the uid of each sample"),
    "values": (
        ConfigError,
        "the values of a critic: leave critic.enable unset or true, or choose an estimator without"
        " one, such as 'grpo'",
    ),
    "reward_baselines": (
        ConfigError,
        "reward_baselines, the scores of greedy responses: the trainer samples these when"
        " algorithm.adv_estimator='remax', or an estimator that needs 'greedy_baseline'",
    ),
    "sum_pi_squared": (
        ConfigError,
        "sum_pi_squared: set actor_rollout_ref.actor.calculate_sum_pi_squared=True",
    ),
    "old_log_probs": (
        ProtocolError,
        "old_log_probs, the actor's log-probabilities of the sampled tokens",
    ),
    "rollout_is_weights": (
        ConfigError,
        "rollout_is_weights: set algorithm.rollout_correction.rollout_is",
    ),
    "non_tensor_batch": (
        ProtocolError,
        "non_tensor_batch, which holds the values that the scorer returned",
    ),
}


def estimate_advantages(
    name: str | Enum, inputs: AdvantageInputs, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Call the named estimator with the inputs and tensors of the batch that it names: (advantages,
    returns)."""
    estimator = get_adv_estimator_fn(name)
    parameters = inspect.signature(estimator).parameters.values()
    named = {parameter.name for parameter in parameters}
    tensors = {} if inputs.batch is None else inputs.batch
    held: dict[str, Any] = {key: tensor for key, tensor in tensors.items() if key in named}
    offered: dict[str, Any] = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    held |= {key: value for key, value in offered.items() if value is not None}
    held["config"] = config
    for parameter in parameters:
        variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        optional = variadic or parameter.default is not parameter.empty
        if not optional and parameter.name not in held:
            raise _missing(_plain(name), parameter.name)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        held = {key: value for key, value in held.items() if key in named}
    with torch.no_grad():
        return estimator(**held)


def _missing(estimator: str, parameter: str) -> CalderaError:
    unknown = (ProtocolError, f"{parameter}, which the batch does not hold")
    kind, origin = _ORIGINS.get(parameter, unknown)
    return kind(f"algorithm.adv_estimator={estimator!r} needs {origin}")
