"""Estimators that compare a response's score with those of its group: the responses to one prompt.

The score is the sum of a response's rewards. Every kept token of a response gets the same
advantage, and the returns are the advantages. Unless an estimator says otherwise, the baseline of
a group of one is 0, and its advantage the score itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from caldera.config.estimators import AdvantageEstimator
from caldera.core_algos.advantages.base import AdvantageEstimatorFn, Uids, register_adv_est
from caldera.core_algos.advantages.tokens import count_tokens, spread, sum_scores, whiten_responses
from caldera.errors import ConfigError, ProtocolError, RewardError

if TYPE_CHECKING:
    from caldera.config.algorithm import AlgorithmConfig


# ---- Groups of responses to the same prompt


@dataclass(frozen=True, eq=False)
class Groups:
    ids: Tensor  # (B,): the number of each row's group
    counts: Tensor  # (G,): rows of each group

    @classmethod
    def from_uids(cls, index: Uids, rows: Tensor) -> Groups:
        """Number the distinct uids in order of appearance; `rows` begins with B."""
        uids = index.tolist() if isinstance(index, Tensor) else index  # tensors hash by identity
        if len(uids) != len(rows):
            raise ProtocolError(f"index holds {len(uids)} uids for a batch of {len(rows)}")
        numbers: dict[Hashable, int] = {}
        numbered = [numbers.setdefault(uid, len(numbers)) for uid in uids]
        ids = torch.tensor(numbered, dtype=torch.long, device=rows.device)
        return cls(ids, torch.bincount(ids))

    @property
    def single(self) -> Tensor:
        """(G,): whether a group has one row."""
        return self.counts == 1

    def sum(self, values: Tensor) -> Tensor:
        """(B, ...) -> (G, ...)."""
        zeros = values.new_zeros(len(self.counts), *values.shape[1:])
        return zeros.index_add_(0, self.ids, values)

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.counts

    def std(self, values: Tensor) -> Tensor:
        """The unbiased standard deviation; of a group of one it is 1."""
        squares = self.sum((values - self.mean(values)[self.ids]).square())
        return (squares / (self.counts - 1).clamp(min=1)).sqrt().masked_fill(self.single, 1)

    def first_two(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(G,), (G,): the rows of the largest and of the second largest value of each group.

        A group of one has its one row twice.
        """
        by_value = values.argsort(stable=True)
        order = by_value[self.ids[by_value].argsort(stable=True)]
        last = self.counts.cumsum(0) - 1
        return order[last], order[last - (~self.single).long()]

    def blocks(self, height: int) -> Iterator[Tensor]:
        """The rows of whole groups, as few groups at a time as make `height` rows."""
        order = self.ids.argsort(stable=True)
        start = end = 0
        for count in self.counts.tolist():
            end += count
            if end - start >= height:
                yield order[start:end]
                start = end
        if start < end:
            yield order[start:]


def of_scores(
    *names: AdvantageEstimator,
) -> Callable[[Callable[..., Tensor]], AdvantageEstimatorFn]:
    """Register an estimator that is written as a function of scores (B,), their groups and options.

    It is called as all are. Each kept token of a response gets its advantage, the returns are the
    advantages.
    """

    def registered(compute: Callable[..., Tensor]) -> AdvantageEstimatorFn:
        @torch.no_grad()
        def estimator(
            token_level_rewards: Tensor,  # (B, R)
            response_mask: Tensor,  # (B, R)
            index: Uids,  # (B,)
            *args: Any,
            **options: Any,
        ) -> tuple[Tensor, Tensor]:
            scores = sum_scores(token_level_rewards, response_mask)
            groups = Groups.from_uids(index, scores)
            advantages = compute(scores, groups, *args, response_mask=response_mask, **options)
            on_tokens = spread(advantages, response_mask, token_level_rewards.dtype)
            return on_tokens, on_tokens

        estimator.__name__, estimator.__doc__ = compute.__name__, compute.__doc__
        for name in names:
            register_adv_est(name)(estimator)
        return estimator

    return registered


EPSILON = 1e-6


@of_scores(AdvantageEstimator.GRPO, AdvantageEstimator.GRPO_VECTORIZED)
def compute_grpo_outcome_advantage(
    scores: Tensor,
    groups: Groups,
    epsilon: float = EPSILON,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: AlgorithmConfig | None = None,
    **_: Any,
) -> Tensor:
    """The score less the group's mean, over the group's standard deviation.

    A group of one has mean 0 and standard deviation 1. Without normalisation by the standard
    deviation this is Dr.GRPO; it is normalised unless the argument or else the config says no.
    """
    normalise = _normalises(norm_adv_by_std_in_grpo, config)
    return relative_to_group(scores, groups, normalise, epsilon)


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage


def relative_to_group(scores: Tensor, groups: Groups, normalise: bool, epsilon: float) -> Tensor:
    """(B,): GRPO's advantages."""
    centred = scores - means_of_several(scores, groups)
    return centred / (groups.std(scores)[groups.ids] + epsilon) if normalise else centred


@of_scores(AdvantageEstimator.GRPO_PASSK)
def compute_grpo_passk_outcome_advantage(
    scores: Tensor,
    groups: Groups,
    epsilon: float = EPSILON,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: AlgorithmConfig | None = None,
    **_: Any,
) -> Tensor:
    """The best response of a group gets its lead over the second best; all others get 0.

    The lead is divided by the group's standard deviation as in GRPO.
    """
    if groups.single.any():
        raise ConfigError(
            "algorithm.adv_estimator='grpo_passk' compares the two best responses to a prompt, and"
            " there is a prompt with one response: set actor_rollout_ref.rollout.n to 2 or more"
        )
    best, second = groups.first_two(scores)  # (G,)
    leads = scores[best] - scores[second]
    if _normalises(norm_adv_by_std_in_grpo, config):
        leads = leads / (groups.std(scores) + epsilon)
    return torch.zeros_like(scores).index_copy_(0, best, leads)


@of_scores(AdvantageEstimator.RLOO)
def compute_rloo_outcome_advantage(scores: Tensor, groups: Groups, **_: Any) -> Tensor:
    """The score less the mean of the other scores of the group."""
    alone = groups.single[groups.ids]
    return torch.where(alone, scores, _leave_one_out(scores, groups))


@of_scores(AdvantageEstimator.RLOO_VECTORIZED)
def compute_rloo_vectorized_outcome_advantage(scores: Tensor, groups: Groups, **_: Any) -> Tensor:
    """As `rloo`, but a group of one gets 0."""
    return _leave_one_out(scores, groups)


def _leave_one_out(scores: Tensor, groups: Groups) -> Tensor:
    """(B,): n / (n - 1) * (score - mean), which is 0 for a group of one."""
    factors = groups.counts / (groups.counts - 1).clamp(min=1)
    return factors[groups.ids] * (scores - groups.mean(scores)[groups.ids])


@of_scores(AdvantageEstimator.OPO)
def compute_opo_outcome_advantage(
    scores: Tensor, groups: Groups, response_mask: Tensor, **_: Any
) -> Tensor:
    """The score less the group's mean score, weighted by the lengths of the responses."""
    lengths = count_tokens(response_mask).to(scores.dtype)
    # A group without any token has baseline 0, and nowhere to put an advantage.
    baselines = groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1)
    return scores - baselines.masked_fill(groups.single, 0)[groups.ids]


@of_scores(AdvantageEstimator.GPG)
def compute_gpg_outcome_advantage(
    scores: Tensor,
    groups: Groups,
    f_norm: float = 1.0,
    **_: Any,
) -> Tensor:
    """The score less the group's mean, scaled by batch size over number of nonzero scores."""
    alpha = len(scores) / scores.count_nonzero().clamp(min=1)
    return alpha * (scores - means_of_several(scores, groups)) / f_norm


@of_scores(AdvantageEstimator.MAXRL)
def compute_maxrl_outcome_advantage(
    scores: Tensor,
    groups: Groups,
    epsilon: float = EPSILON,
    **_: Any,
) -> Tensor:
    """Maximum likelihood RL: the score less the group's mean, over that mean.

    The rarer success is, the more it counts. A group without success (its mean is not positive)
    gets 0, and so does a group of one.
    """
    means = groups.mean(scores)[groups.ids]
    return ((scores - means) / (means + epsilon)).masked_fill(means <= 0, 0)


def means_of_several(scores: Tensor, groups: Groups) -> Tensor:
    """(B,): the mean of each row's group; 0 for a group of one."""
    return groups.mean(scores).masked_fill(groups.single, 0)[groups.ids]


def _normalises(argument: bool | None, config: AlgorithmConfig | None) -> bool:
    if argument is not None:
        return argument
    return config is None or config.norm_adv_by_std_in_grpo


Columns = Mapping[str, np.ndarray[Any, Any]]


@register_adv_est(AdvantageEstimator.GDPO)
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,  # (B, R)
    response_mask: Tensor,  # (B, R)
    index: Uids,  # (B,)
    non_tensor_batch: Columns,
    config: AlgorithmConfig,
    epsilon: float = EPSILON,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Normalise each of `gdpo_reward_keys` within its group as GRPO does; whiten the weighted sum.

    The rewards are the scorer's values of these keys; of `token_level_rewards` only shape and
    dtype are used. The returns are the advantages.
    """
    groups = Groups.from_uids(index, token_level_rewards)
    total = torch.zeros(len(groups.ids), dtype=torch.float64, device=groups.ids.device)  # (B,)
    for key, weight in _keys_and_weights(config):
        scores = _column(non_tensor_batch, key).to(total.device)
        normalise = config.norm_adv_by_std_in_grpo
        total += weight * relative_to_group(scores, groups, normalise, epsilon)
    whitened = whiten_responses(total, count_tokens(response_mask))
    advantages = spread(whitened, response_mask, token_level_rewards.dtype)
    return advantages, advantages


def _keys_and_weights(config: AlgorithmConfig) -> list[tuple[str, float]]:
    keys, weights = config.gdpo_reward_keys, config.gdpo_reward_weights
    if not keys:
        raise ConfigError(
            "algorithm.adv_estimator='gdpo' needs algorithm.gdpo_reward_keys: the names of values"
            " that the scorer returns"
        )
    if weights is None:
        weights = [1.0] * len(keys)
    if len(weights) != len(keys):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights holds {len(weights)} numbers for the {len(keys)} keys"
            " of algorithm.gdpo_reward_keys"
        )
    return list(zip(keys, weights, strict=True))


def _column(columns: Columns, key: str) -> Tensor:
    """(B,) float64: what the scorer returned under this key."""
    if key not in columns:
        raise ConfigError(
            f"algorithm.gdpo_reward_keys names {key!r}, which the scorer does not return"
            f" (the batch holds: {', '.join(sorted(columns))})"
        )
    for row, value in enumerate(columns[key]):
        if not isinstance(value, int | float | np.number | np.bool_):
            raise RewardError(
                f"algorithm.gdpo_reward_keys names {key!r}, which is {value!r} and no number for"
                f" sample {row}"
            )
    return torch.from_numpy(columns[key].astype(np.float64))
