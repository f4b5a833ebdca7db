"""bypass_mode: the sampler's log-probs stand for the old policy.

    l = log_prob (now) - rollout_log_prob
    mask' = what rejection by l leaves of the mask       w = importance weights of l, held fixed

    ppo_clip    the vanilla loss with old = rollout, on the tokens of mask'; w is not used
    reinforce   -A w lp, on the tokens of mask'

Rejected tokens count in the denominators of the aggregation: they add 0, not nothing.
"""

from __future__ import annotations

from .basics import Matrix, each
from .policy_losses import LossResult, Settings, reduce_loss, vanilla
from .rollout_correction import is_weights, rejection_mask


def bypass_mode(
    rollout_log_prob: Matrix,
    log_prob: Matrix,
    advantages: Matrix,
    response_mask: Matrix,
    loss_agg_mode: str,
    settings: Settings,
    loss_type: str,
    rollout_is: str | None,
    rollout_is_threshold: str,
    rollout_rs: str | None,
    rollout_rs_threshold: str | None,
    rollout_is_batch_normalize: bool = False,
) -> LossResult:
    survivors = response_mask
    if rollout_rs and rollout_rs_threshold:
        survivors = rejection_mask(
            log_prob, rollout_log_prob, response_mask, rollout_rs, rollout_rs_threshold
        )
    weights = each(lambda _: 1.0, response_mask)
    if rollout_is:
        weights = is_weights(
            log_prob,
            rollout_log_prob,
            response_mask,
            rollout_is,
            rollout_is_threshold,
            rollout_is_batch_normalize,
        )
    if loss_type == "ppo_clip":
        losses, slopes = (
            each(
                lambda lp, old, a, here, part=part: vanilla(lp, old, a, settings)[part] * here,
                log_prob,
                rollout_log_prob,
                advantages,
                survivors,
            )
            for part in (0, 1)
        )
    else:
        slopes = each(lambda a, w, here: -a * w * here, advantages, weights, survivors)
        losses = each(lambda slope, lp: slope * lp, slopes, log_prob)
    return reduce_loss(losses, slopes, response_mask, loss_agg_mode, settings)
