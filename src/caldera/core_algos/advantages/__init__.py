"""Advantage estimators: from rewards to how much better each token did than expected.

Every registered estimator is called in one way, by `estimate_advantages`: with the keywords
`token_level_rewards`, `response_mask` and `config` (the AlgorithmConfig), and with those fields of
`AdvantageInputs` that the batch holds and that the estimator's signature takes. It returns
`(advantages, returns)`, both (B, R). The estimators here return zero outside the response mask.
"""

from __future__ import annotations

from caldera.config.estimators import AdvantageEstimator
from caldera.core_algos.advantages.base import (
    ADV_ESTIMATORS,
    AdvantageEstimatorFn,
    AdvantageInputs,
    estimate_advantages,
    get_adv_estimator_fn,
    register_adv_est,
)
from caldera.core_algos.advantages.gae import (
    compute_gae_advantage_return,
    compute_pf_ppo_indices,
    compute_pf_ppo_weights,
)
from caldera.core_algos.advantages.group_relative import (
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    compute_maxrl_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
)
from caldera.core_algos.advantages.reinforce import (
    compute_optimal_token_baseline_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_tir_optimal_token_baseline_advantage,
)

__all__ = [
    "ADV_ESTIMATORS",
    "AdvantageEstimator",
    "AdvantageEstimatorFn",
    "AdvantageInputs",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_maxrl_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_pf_ppo_indices",
    "compute_pf_ppo_weights",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_tir_optimal_token_baseline_advantage",
    "estimate_advantages",
    "get_adv_estimator_fn",
    "register_adv_est",
]
