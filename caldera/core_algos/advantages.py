"""Advantage estimators: from rewards to how much better each token did than expected.

Every registered estimator is called in one way, by `estimate_advantages`: with the keywords
`token_level_rewards`, `response_mask` and `config` (the AlgorithmConfig), and with those of
`index` (the uids), `values` and `reward_baselines` that the batch holds and that the estimator's
signature takes. It returns `(advantages, returns)`, both (B, R). The estimators here return zero
outside the response mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from caldera.core_algos.masked import masked_whiten, zero_outside
from caldera.errors import ConfigError, ProtocolError
from caldera.registry import Registry

if TYPE_CHECKING:
    from caldera.config.algorithm import AlgorithmConfig

__all__ = [
    "ADV_ESTIMATORS",
    "AdvantageEstimator",
    "AdvantageEstimatorFn",
    "AdvantageInputs",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "estimate_advantages",
    "get_adv_estimator_fn",
    "register_adv_est",
]

AdvantageEstimatorFn = Callable[..., tuple[Tensor, Tensor]]
Uids = np.ndarray[Any, Any] | Sequence[Hashable] | Tensor

ADV_ESTIMATORS: Registry[AdvantageEstimatorFn] = Registry("algorithm.adv_estimator")


class AdvantageEstimator(StrEnum):
    """The estimators that come with Caldera: values of `algorithm.adv_estimator`."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"


def register_adv_est(
    name: str | Enum,
) -> Callable[[AdvantageEstimatorFn], AdvantageEstimatorFn]:
    """Decorate an estimator to make it a value of `algorithm.adv_estimator`."""
    return ADV_ESTIMATORS.register(_plain(name))


def get_adv_estimator_fn(name: str | Enum) -> AdvantageEstimatorFn:
    return ADV_ESTIMATORS[_plain(name)]


def _plain(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """What a batch offers to an estimator; None stands for what it does not hold."""

    token_level_rewards: Tensor  # (B, R)
    response_mask: Tensor  # (B, R)
    index: Uids | None = None  # (B,): samples of one prompt share a uid
    values: Tensor | None = None  # (B, R), of the critic
    reward_baselines: Tensor | None = None  # (B,), of greedy answers


def estimate_advantages(
    name: str | Enum, inputs: AdvantageInputs, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Call the named estimator with whatever of the inputs it takes: (advantages, returns)."""
    estimator = get_adv_estimator_fn(name)
    held = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    held = {key: value for key, value in held.items() if value is not None}
    parameters = inspect.signature(estimator).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        held = {key: value for key, value in held.items() if key in parameters}
    with torch.no_grad():
        return estimator(config=config, **held)


def _reverse_scan(addend: Tensor, decay: Tensor) -> Tensor:
    """y_t = addend_t + decay_t * y_{t+1} along the last dimension, with zero beyond the end."""
    addends, decays = addend.T.contiguous(), decay.T.contiguous()  # (R, B): rows are contiguous
    scanned = torch.empty_like(addends)
    carried = addend.new_zeros(len(addend))  # (B,)
    for t in range(len(addends) - 1, -1, -1):
        carried = torch.addcmul(addends[t], decays[t], carried, out=scanned[t])
    return scanned.T.contiguous()


def _discounted_sum(values: Tensor, mask: Tensor, discount: float) -> Tensor:
    """Discounted sums to the end; positions outside the mask add nothing and discount nothing."""
    decay = torch.ones_like(values).masked_fill(mask.bool(), discount)
    return _reverse_scan(zero_outside(values, mask), decay)


@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor,  # (B, R)
    values: Tensor,  # (B, R)
    response_mask: Tensor,  # (B, R)
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the tokens of the mask, as if they were adjacent.

    Tool and user tokens amid a response are no actions: the recursion passes over them. The
    returns are advantage + value; the advantages are then whitened.
    """
    # The value of the first masked-in token at or after each position, then strictly after it.
    upcoming = _reverse_scan(
        zero_outside(values, response_mask), (~response_mask.bool()).to(values.dtype)
    )
    next_values = torch.zeros_like(upcoming)
    next_values[:, :-1] = upcoming[:, 1:]
    deltas = token_level_rewards + gamma * next_values - values
    advantages = _discounted_sum(deltas, response_mask, gamma * lam)
    returns = advantages + values
    whitened = masked_whiten(advantages, response_mask)
    return zero_outside(whitened, response_mask), zero_outside(returns, response_mask)


@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,  # (B, R)
    response_mask: Tensor,  # (B, R)
    index: Uids,  # (B,)
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """Each response's score against those of its group: the responses of the same uid.

    A group of one has mean 0 and standard deviation 1. Without normalisation by the standard
    deviation this is Dr.GRPO. The returns are the advantages.
    """
    groups = _group_ids(index, len(token_level_rewards)).to(token_level_rewards.device)  # (B,)
    # In float64 the mean of equal float32 scores is exact, so that a group that agrees has
    # advantage 0 instead of rounding noise divided by epsilon.
    scores = token_level_rewards.sum(-1, dtype=torch.float64)  # (B,)
    counts = torch.bincount(groups)  # (G,)
    single = counts == 1
    means = _sum_by_group(scores, groups, counts) / counts
    centred = scores - means.masked_fill(single, 0)[groups]
    if norm_adv_by_std_in_grpo:
        squares = _sum_by_group((scores - means[groups]).square(), groups, counts)
        stds = (squares / (counts - 1).clamp(min=1)).sqrt().masked_fill(single, 1)
        centred = centred / (stds[groups] + epsilon)
    advantages = centred.to(token_level_rewards.dtype).unsqueeze(-1).expand_as(response_mask)
    advantages = zero_outside(advantages, response_mask)
    return advantages, advantages


def _group_ids(index: Uids, batch_size: int) -> Tensor:
    """Number the distinct uids in order of appearance."""
    uids = index.tolist() if isinstance(index, Tensor) else index  # tensors hash by identity
    if len(uids) != batch_size:
        raise ProtocolError(f"index holds {len(uids)} uids for a batch of {batch_size}")
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=torch.long)


def _sum_by_group(values: Tensor, groups: Tensor, counts: Tensor) -> Tensor:
    return values.new_zeros(len(counts)).index_add_(0, groups, values)


@register_adv_est(AdvantageEstimator.GAE)
def _gae(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: AlgorithmConfig,
    values: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    if values is None:
        raise ConfigError(
            "algorithm.adv_estimator='gae' needs the values of a critic: leave critic.enable unset"
            " or true, or choose an estimator without one, such as 'grpo'"
        )
    return compute_gae_advantage_return(
        token_level_rewards, values, response_mask, gamma=config.gamma, lam=config.lam
    )


@register_adv_est(AdvantageEstimator.GRPO)
def _grpo(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: AlgorithmConfig,
    index: Uids | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    if index is None:
        raise ProtocolError("algorithm.adv_estimator='grpo' needs index, the uid of each sample")
    return compute_grpo_outcome_advantage(
        token_level_rewards,
        response_mask,
        index,
        norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo,
    )


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor,  # (B, R)
    response_mask: Tensor,  # (B, R)
    config: AlgorithmConfig,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The discounted return of each token, whitened over the batch; no critic, no groups."""
    returns = _discounted_sum(token_level_rewards, response_mask, config.gamma)
    whitened = masked_whiten(returns, response_mask)
    return zero_outside(whitened, response_mask), zero_outside(returns, response_mask)
