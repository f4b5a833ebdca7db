"""The mathematics of reinforcement learning: pure functions of tensors."""

from __future__ import annotations

from caldera.core_algos.advantages import (
    ADV_ESTIMATORS,
    AdvantageEstimator,
    AdvantageEstimatorFn,
    AdvantageInputs,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    estimate_advantages,
    get_adv_estimator_fn,
    register_adv_est,
)
from caldera.core_algos.aggregation import (
    LOSS_AGG_MODES,
    Count,
    LossScale,
    agg_loss,
)
from caldera.core_algos.entropy import (
    entropy_from_logits,
    entropy_from_logits_with_chunking,
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
from caldera.core_algos.masked import (
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    zero_outside,
)
from caldera.core_algos.policy_losses import (
    POLICY_LOSSES,
    PolicyLossFn,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    register_policy_loss,
)
from caldera.core_algos.value_loss import (
    compute_value_loss,
)

__all__ = [
    "ADV_ESTIMATORS",
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
    "PolicyLossFn",
    "agg_loss",
    "apply_kl_penalty",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_value_loss",
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
