"""The mathematics of reinforcement learning: pure functions of tensors."""

from __future__ import annotations

from caldera.config.actor import LOSS_AGG_MODES
from caldera.config.estimators import AdvantageEstimator
from caldera.config.preference import DPO_LOSSES
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
from caldera.core_algos.aggregation import (
    Count,
    LossScale,
    agg_loss,
    entropy_from_logits,
    entropy_from_logits_with_chunking,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    zero_outside,
)
from caldera.core_algos.kl import (
    KL_PENALTIES,
    AdaptiveKLController,
    FixedKLController,
    KLController,
    apply_kl_penalty,
    get_kl_controller,
    kl_penalty,
)
from caldera.core_algos.policy_losses.base import (
    POLICY_LOSSES,
    PolicyLossFn,
    call_policy_loss,
    get_policy_loss_fn,
    register_policy_loss,
)
from caldera.core_algos.policy_losses.bypass import compute_policy_loss_bypass_mode
from caldera.core_algos.policy_losses.clipped import (
    compute_policy_loss_cispo,
    compute_policy_loss_clip_cov,
    compute_policy_loss_dro,
    compute_policy_loss_geo_mean,
    compute_policy_loss_gpg,
    compute_policy_loss_gspo,
    compute_policy_loss_kl_cov,
    compute_policy_loss_sapo,
    compute_policy_loss_vanilla,
)
from caldera.core_algos.policy_losses.divergence import (
    compute_policy_loss_dppo_kl,
    compute_policy_loss_dppo_tv,
)
from caldera.core_algos.preference import PairMetrics, bradley_terry_loss, dpo_loss
from caldera.core_algos.rollout_correction import (
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
    compute_variance_proxies,
)
from caldera.core_algos.value_loss import compute_value_loss

__all__ = [
    "ADV_ESTIMATORS",
    "DPO_LOSSES",
    "KL_PENALTIES",
    "LOSS_AGG_MODES",
    "POLICY_LOSSES",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "AdvantageEstimatorFn",
    "AdvantageInputs",
    "Count",
    "FixedKLController",
    "KLController",
    "LossScale",
    "PairMetrics",
    "PolicyLossFn",
    "agg_loss",
    "apply_kl_penalty",
    "bradley_terry_loss",
    "call_policy_loss",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_maxrl_outcome_advantage",
    "compute_offpolicy_metrics",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_pf_ppo_indices",
    "compute_pf_ppo_weights",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_rollout_correction_and_rejection_mask",
    "compute_tir_optimal_token_baseline_advantage",
    "compute_value_loss",
    "compute_variance_proxies",
    "dpo_loss",
    "entropy_from_logits",
    "entropy_from_logits_with_chunking",
    "estimate_advantages",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "register_adv_est",
    "register_policy_loss",
    "zero_outside",
]
