"""The loss of bypass mode: rollout correction inside the update."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from caldera.config.rollout_correction import RolloutCorrectionConfig
from caldera.core_algos.aggregation import zero_outside
from caldera.core_algos.policy_losses.base import (
    LossAndMetrics,
    LossInputs,
    policy_loss,
    shares_of_means,
)
from caldera.core_algos.policy_losses.clipped import compute_policy_loss_vanilla
from caldera.core_algos.rollout_correction import compute_rollout_correction_and_rejection_mask
from caldera.errors import ConfigError

if TYPE_CHECKING:
    from caldera.config.actor import ActorConfig


@policy_loss("bypass_mode")
def compute_policy_loss_bypass_mode(given: LossInputs) -> LossAndMetrics:
    """`old_log_prob` is the sampler's. Importance weights and rejections are computed anew from
    the policy as it is now, with the settings of `algorithm.rollout_correction`.

    loss_type=ppo_clip is the vanilla loss of the tokens that are not rejected, without the
    computed weights: the clip bounds the same ratio. loss_type=reinforce is their policy gradient
    times the weights.

    A rejected token counts as 0 rather than making the others heavier: denominators count the
    mask before any rejection. With rollout_is_batch_normalize the weights are normalised among
    the tensors at hand, and the loss depends on how micro-batches are cut. Metrics under
    rollout_corr/ are token-weighted means over micro-batches, the maxima and minima among them too.
    """
    correction, mask = _correction_of(given.config), given.response_mask
    old_log_prob = zero_outside(given.old_log_prob, mask)
    log_prob = given.kept_log_prob()
    weights, accepted, corr_metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=log_prob.detach(),
        rollout_log_prob=old_log_prob,
        response_mask=mask,
        rollout_is=correction.rollout_is,
        rollout_is_threshold=correction.rollout_is_threshold,
        rollout_rs=correction.rollout_rs,
        rollout_rs_threshold=correction.rollout_rs_threshold,
        rollout_is_batch_normalize=correction.rollout_is_batch_normalize,
    )
    corr_shares = shares_of_means(corr_metrics, mask, given.counts, like=log_prob)
    advantages = zero_outside(given.advantages, accepted)
    if correction.loss_type == "ppo_clip":
        accepted_alone = replace(given, advantages=advantages)
        loss, metrics = compute_policy_loss_vanilla(**vars(accepted_alone))
        return loss, {**metrics, **corr_shares}

    losses = -advantages * log_prob
    loss = given.aggregate(losses if weights is None else losses * weights)
    return loss, {**given.metrics(-given.log_ratio()), **corr_shares}


def _correction_of(config: ActorConfig) -> RolloutCorrectionConfig:
    correction = config.policy_loss.rollout_correction
    if not isinstance(correction, RolloutCorrectionConfig):
        raise ConfigError(
            "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode needs the settings of "
            "algorithm.rollout_correction: set algorithm.rollout_correction.bypass_mode=true"
        )
    if correction.loss_type not in ("ppo_clip", "reinforce"):
        raise ConfigError(
            f"algorithm.rollout_correction.loss_type={correction.loss_type!r}: "
            "takes one of ppo_clip, reinforce"
        )
    return correction
