"""The advantage estimators that come with Caldera, and what an estimator may need of a run.

The trainer builds what is needed, and the config's checks refuse a run that cannot have it.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from caldera.errors import ConfigError

if TYPE_CHECKING:
    from caldera.config.ppo import PPOTrainerConfig

CRITIC = "critic"
GREEDY_BASELINE = "greedy_baseline"
GROUPS = "groups"
PAIRS = "pairs"
REWARD_KEYS = "reward_keys"
SUM_PI_SQUARED = "sum_pi_squared"

NEEDS = {
    CRITIC: "a critic is trained, whose values come as `values`",
    GREEDY_BASELINE: "a greedy response to each prompt is scored, as `reward_baselines`",
    GROUPS: "actor_rollout_ref.rollout.n is 2 or more",
    PAIRS: "a response that alone of its group has a reward is left out",
    REWARD_KEYS: "algorithm.gdpo_reward_keys names values of the scorer",
    SUM_PI_SQUARED: "the actor's sums of squared probabilities come as `sum_pi_squared`",
}
"""What an estimator may need -> what it then gets."""


class AdvantageEstimator(StrEnum):
    """The estimators that come with Caldera: values of `algorithm.adv_estimator`."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_VECTORIZED = "grpo_vectorized"
    GRPO_PASSK = "grpo_passk"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    RLOO_VECTORIZED = "rloo_vectorized"
    OPO = "opo"
    GPG = "gpg"
    MAXRL = "maxrl"
    GDPO = "gdpo"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"


ESTIMATOR_NEEDS: dict[str, frozenset[str]] = {
    AdvantageEstimator.GAE: frozenset({CRITIC}),
    AdvantageEstimator.GRPO: frozenset({GROUPS}),
    AdvantageEstimator.GRPO_VECTORIZED: frozenset({GROUPS}),
    AdvantageEstimator.GRPO_PASSK: frozenset({GROUPS, PAIRS}),
    AdvantageEstimator.REINFORCE_PLUS_PLUS: frozenset(),
    AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE: frozenset({GROUPS}),
    AdvantageEstimator.REMAX: frozenset({GREEDY_BASELINE}),
    AdvantageEstimator.RLOO: frozenset({GROUPS}),
    AdvantageEstimator.RLOO_VECTORIZED: frozenset({GROUPS}),
    AdvantageEstimator.OPO: frozenset({GROUPS}),
    AdvantageEstimator.GPG: frozenset({GROUPS}),
    AdvantageEstimator.MAXRL: frozenset({GROUPS}),
    AdvantageEstimator.GDPO: frozenset({GROUPS, REWARD_KEYS}),
    AdvantageEstimator.OPTIMAL_TOKEN_BASELINE: frozenset({GROUPS, SUM_PI_SQUARED}),
    AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE: frozenset({GROUPS, SUM_PI_SQUARED}),
}
"""What each of them needs. Registration adds those of custom estimators; one that
is not here is not loaded yet."""


def declare_needs(name: str, needs: Collection[str]) -> None:
    """Note what a custom estimator needs."""
    if unknown := sorted(set(needs) - NEEDS.keys()):
        known = ", ".join(NEEDS)
        raise ConfigError(
            f"algorithm.adv_estimator={name!r} needs {unknown[0]!r}: takes some of {known}"
        )
    ESTIMATOR_NEEDS[name] = frozenset(needs)


def needs_of(name: str) -> frozenset[str]:
    """What an estimator needs; nothing is known of one that is not loaded yet."""
    return ESTIMATOR_NEEDS.get(name, frozenset())


GROUP_SIZE = 8
"""Responses to a prompt for an estimator that compares them, where `rollout.n` is not given."""


def with_group_size(values: dict[str, Any]) -> dict[str, Any]:
    """The keys that were given, with `rollout.n` where the estimator needs it and nothing says
    it."""
    key, estimator = "actor_rollout_ref.rollout.n", str(values.get("algorithm.adv_estimator"))
    return {key: GROUP_SIZE, **values} if GROUPS in needs_of(estimator) else values


def needs_critic(config: PPOTrainerConfig) -> bool:
    """A critic is trained."""
    if config.critic.enable is not None:
        return config.critic.enable
    return CRITIC in needs_of(config.algorithm.adv_estimator)


def needs_reference(config: PPOTrainerConfig) -> bool:
    """Log-probs of the reference are needed."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def check_estimator(config: PPOTrainerConfig) -> None:
    """The run has what the estimator needs, as far as is known before it is loaded."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    name = algorithm.adv_estimator
    needs = needs_of(name)
    if CRITIC in needs and config.critic.enable is False:
        raise ConfigError(
            f"critic.enable=False (or critic=null): algorithm.adv_estimator={name} needs the critic"
        )
    if SUM_PI_SQUARED in needs and not actor.calculate_sum_pi_squared:
        raise ConfigError(
            f"algorithm.adv_estimator={name!r} needs "
            "actor_rollout_ref.actor.calculate_sum_pi_squared=True"
        )
    if SUM_PI_SQUARED in needs and algorithm.rollout_correction.bypass_mode:
        raise ConfigError(
            f"algorithm.adv_estimator={name!r} needs the trainer's own log-probs, which "
            "algorithm.rollout_correction.bypass_mode=True leaves out"
        )
    if REWARD_KEYS in needs and not algorithm.gdpo_reward_keys:
        raise ConfigError(
            f"algorithm.adv_estimator={name!r} needs algorithm.gdpo_reward_keys=[...]: the names "
            "of the scorer's values"
        )
    if algorithm.use_pf_ppo and name in ESTIMATOR_NEEDS and CRITIC not in needs:
        raise ConfigError(
            f"algorithm.use_pf_ppo=True goes with algorithm.adv_estimator=gae, not {name!r}"
        )


def check_group_size(name: str, n: int) -> None:
    """`n` responses a prompt are enough for the estimator."""
    if n > 1 or GROUPS not in needs_of(name):
        return
    others = sorted(other for other, needs in ESTIMATOR_NEEDS.items() if GROUPS not in needs)
    raise ConfigError(
        f"actor_rollout_ref.rollout.n={n}: algorithm.adv_estimator={name!r} compares the "
        "responses to one prompt, and one response has nothing to be compared with; takes 2 or "
        "more, such as actor_rollout_ref.rollout.n=8, or an estimator that needs no group: "
        f"{', '.join(others)}"
    )
