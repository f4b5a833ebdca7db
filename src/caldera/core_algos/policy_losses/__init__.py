"""Policy losses, by family; `base` has the contract that all of them follow."""

from __future__ import annotations

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

__all__ = [
    "POLICY_LOSSES",
    "PolicyLossFn",
    "call_policy_loss",
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
    "get_policy_loss_fn",
    "register_policy_loss",
]
