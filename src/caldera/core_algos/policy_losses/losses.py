"""The policy losses: those that clip the ratio of a token or a sequence or gate it softly, those
that drop tokens, and that of bypass mode."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from caldera.config.rollout_correction import RolloutCorrectionConfig
from caldera.core_algos.aggregation import masked_mean, masked_sum, zero_outside
from caldera.core_algos.policy_losses.base import (
    MAX_LOG_RATIO,
    LossAndMetrics,
    LossInputs,
    bounded_exp,
    clip_range,
    clipped_objective,
    policy_loss,
    shares_of_means,
)
from caldera.core_algos.rollout_correction import compute_rollout_correction_and_rejection_mask
from caldera.errors import ConfigError

if TYPE_CHECKING:
    from caldera.config.actor import ActorConfig


@policy_loss("vanilla")
def compute_policy_loss_vanilla(given: LossInputs) -> LossAndMetrics:
    """PPO's clipped objective, with dual clip: where the advantage is negative, the loss stops
    growing at `clip_ratio_c` times its size."""
    config, advantages = given.config, given.advantages
    if config.clip_ratio_c <= 1:
        raise ConfigError(
            f"actor_rollout_ref.actor.clip_ratio_c={config.clip_ratio_c} must be greater than 1"
        )
    log_ratio = given.log_ratio().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    pessimistic, clipped = clipped_objective(log_ratio.exp(), advantages, config)
    ceiling = -advantages * config.clip_ratio_c
    negative = advantages < 0
    losses = torch.where(negative, torch.minimum(pessimistic, ceiling), pessimistic)
    over_ceiling = (pessimistic > ceiling) & negative
    return given.aggregate(losses), given.metrics(-log_ratio, clipped, over_ceiling)


@policy_loss("cispo")
def compute_policy_loss_cispo(given: LossInputs) -> LossAndMetrics:
    """CISPO: the policy gradient, weighed by the clipped ratio as a constant. A clipped token
    keeps its gradient."""
    low, high = clip_range(given.config)
    log_ratio = given.log_ratio().detach()
    ratio = bounded_exp(log_ratio)
    weight = ratio.clamp(1 - low, 1 + high)
    losses = -weight * given.advantages * given.kept_log_prob()
    return given.aggregate(losses), given.metrics(-log_ratio, weight != ratio)


MAX_SEQUENCE_LOG_RATIO = 10.0


@policy_loss("gspo")
def compute_policy_loss_gspo(given: LossInputs) -> LossAndMetrics:
    """GSPO: PPO's clipped objective with the geometric mean of a sequence's ratios in place of
    each of them.

    The gradient reaches a token through its own log-prob alone, so that advantages may differ
    between tokens. Aggregation is always seq-mean-token-mean: `loss_agg_mode` is not read.
    """
    log_prob = given.kept_log_prob()
    log_ratio = given.log_ratio().detach()
    sequence_log_ratio = _sequence_mean(log_ratio, given.response_mask).unsqueeze(-1)  # (B, 1)
    own_gradient = log_prob - log_prob.detach()  # 0
    ratio = (sequence_log_ratio + own_gradient).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()

    losses, clipped = clipped_objective(ratio, given.advantages, given.config)
    loss = given.aggregate(losses, "seq-mean-token-mean")
    return loss, given.metrics(-log_ratio, clipped)


@policy_loss("geo_mean")
def compute_policy_loss_geo_mean(given: LossInputs) -> LossAndMetrics:
    """GMPO: the geometric mean of a sequence's ratios, clipped one by one in log space, times the
    mean of its advantages.

    The log-ratio of a token is cut at `clip_ratio_high` where its advantage is positive, and held
    at `-clip_ratio_low` otherwise. The loss is the mean over the sequences that have tokens:
    `loss_agg_mode` is not read. Importance weights count with their geometric mean in a sequence,
    so that one weight of 0 takes out all of it.
    """
    low, high = clip_range(given.config)
    advantages, mask, weights = given.advantages, given.response_mask, given.rollout_is_weights
    log_ratio = given.log_ratio()
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))

    ratio = bounded_exp(_sequence_mean(clipped, mask))  # (B,)
    losses = -_sequence_mean(advantages, mask) * ratio
    if weights is not None:
        losses = losses * _sequence_mean(weights.log(), mask).exp()

    # A sequence is one element here: its sum is itself.
    has_tokens = mask.bool().any(-1, keepdim=True)
    loss = given.counts.aggregate(losses.unsqueeze(-1), has_tokens, "seq-mean-token-sum")
    return loss, given.metrics(-log_ratio, clipped < log_ratio, clipped > log_ratio)


def _sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(B, R) -> (B,): means over tokens, 0 for a sequence without any."""
    return masked_sum(values, mask, dim=-1) / mask.bool().sum(-1).clamp(min=1)


@policy_loss("sapo")
def compute_policy_loss_sapo(given: LossInputs) -> LossAndMetrics:
    """SAPO: a sigmoid of the ratio in place of the clip. Its slope is 1 at ratio 1 and fades on
    both sides, the faster the higher `tau_pos` or `tau_neg`, by the sign of the advantage.

    Aggregation is always seq-mean-token-mean: `loss_agg_mode` is not read.
    """
    config, advantages = given.config, given.advantages
    for key in ("tau_pos", "tau_neg"):
        if getattr(config, key) <= 0:
            raise ConfigError(f"actor_rollout_ref.actor.{key}={getattr(config, key)} must be > 0")
    log_ratio = given.log_ratio()
    ratio = bounded_exp(log_ratio)
    tau = torch.full_like(ratio, config.tau_neg).masked_fill(advantages > 0, config.tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    loss = given.aggregate(-advantages * gate, "seq-mean-token-mean")
    return loss, given.metrics(-log_ratio)


@policy_loss("gpg")
def compute_policy_loss_gpg(given: LossInputs) -> LossAndMetrics:
    """GPG: the policy gradient as it is. `old_log_prob` is not read, and there are no metrics."""
    return given.aggregate(-given.advantages * given.kept_log_prob()), {}


@policy_loss("dro")
def compute_policy_loss_dro(given: LossInputs) -> LossAndMetrics:
    """DRO: the policy gradient, and half the squared log-ratio times `policy_loss.dro_beta` to
    hold the policy near the old one."""
    beta = given.config.policy_loss.dro_beta
    if beta is None or beta <= 0:
        raise ConfigError(
            f"actor_rollout_ref.actor.policy_loss.dro_beta={beta}: loss_mode=dro needs one > 0"
        )
    log_ratio = given.log_ratio()
    losses = beta / 2 * log_ratio.square() - given.advantages * given.kept_log_prob()
    return given.aggregate(losses), given.metrics(-log_ratio)


@policy_loss("clip_cov")
def compute_policy_loss_clip_cov(given: LossInputs) -> LossAndMetrics:
    """Clip-Cov: PPO's clipped objective (no dual clip), less a random few of the tokens with a
    covariance between `clip_cov_lb` and `clip_cov_ub`.

    The few are `clip_cov_ratio` of all tokens, and one at least, among those that are not clipped
    already; they count as 0 in the mean. The draw is a function of the tensors alone (see
    `_draw`), so that a resumed run repeats it. The loss depends on how micro-batches are cut.
    """
    settings, mask, old_log_prob = given.config.policy_loss, given.response_mask, given.old_log_prob
    log_ratio = given.log_ratio()
    losses, clipped = clipped_objective(bounded_exp(log_ratio), given.advantages, given.config)

    covariances = _covariances(given)
    within = (covariances > settings.clip_cov_lb) & (covariances < settings.clip_cov_ub)
    candidates = within & ~clipped & mask.bool()
    number = _few(settings.clip_cov_ratio, mask)
    taken_out = _draw(candidates, number, old_log_prob, _seed_of(old_log_prob, mask))

    loss = given.aggregate(losses.masked_fill(taken_out, 0))
    return loss, given.metrics(-log_ratio, clipped | taken_out)


@policy_loss("kl_cov")
def compute_policy_loss_kl_cov(given: LossInputs) -> LossAndMetrics:
    """KL-Cov: the ratio times the advantage, unclipped, and a hold on the tokens with the highest
    covariance: `ppo_kl_coef` times the absolute log-ratio.

    These are `kl_cov_ratio` of all tokens, and one at least. The metric actor/ppo_kl is the mean
    absolute log-ratio. The loss depends on how micro-batches are cut.
    """
    settings, mask = given.config.policy_loss, given.response_mask
    log_ratio = given.log_ratio()
    distance = log_ratio.abs()

    ranked = _covariances(given).masked_fill(~mask.bool(), -torch.inf).flatten()
    highest = ranked.topk(_few(settings.kl_cov_ratio, mask)).indices
    held = _at(highest, mask)

    losses = -given.advantages * bounded_exp(log_ratio)
    losses = losses + settings.ppo_kl_coef * distance.masked_fill(~held, 0)
    return given.aggregate(losses), given.metrics(distance)


def _covariances(given: LossInputs) -> Tensor:
    """Each token's term of the covariance of log-probs and advantages, 0 outside the mask."""
    log_prob, advantages, mask = given.log_prob.detach(), given.advantages, given.response_mask
    from_mean_advantage = advantages - masked_mean(advantages, mask)
    from_mean_log_prob = log_prob - masked_mean(log_prob, mask)
    return zero_outside(from_mean_advantage * from_mean_log_prob, mask)


def _few(ratio: float, mask: Tensor) -> int:
    """That part of the mask's tokens, at least one if there is any."""
    tokens = int(mask.bool().sum())
    return min(tokens, max(1, int(ratio * tokens)))


def _seed_of(values: Tensor, mask: Tensor) -> int:
    """A number from the bits of the values in the mask, whatever their order and padding."""
    return int(values.detach()[mask.bool()].double().view(torch.int64).sum())


def _draw(candidates: Tensor, number: int, values: Tensor, seed: int) -> Tensor:
    """A mask of that many candidates, or of all if there are fewer.

    The generator is the call's own, and on the CPU: the draw neither moves the global one nor
    depends on the device. Candidates are put in the order of their values first, so that the
    order of rows does not matter either.
    """
    positions = candidates.flatten().nonzero().squeeze(-1)
    positions = positions[values.flatten()[positions].argsort(stable=True)]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(positions), generator=generator)[:number]
    return _at(positions[drawn.to(positions.device)], candidates)


def _at(positions: Tensor, like: Tensor) -> Tensor:
    """A mask with ones at these positions of the flattened tensor."""
    mask = torch.zeros(like.numel(), dtype=torch.bool, device=like.device)
    mask[positions] = True
    return mask.view(like.shape)


# ---- DPPO: tokens are dropped by how far their probability has moved, not by its ratio


@policy_loss("dppo_tv")
def compute_policy_loss_dppo_tv(given: LossInputs) -> LossAndMetrics:
    """DPPO with total variation: a token is dropped once its probability has risen by more than
    `clip_ratio_high` (advantage > 0), or fallen by more than `clip_ratio_low` (otherwise)."""
    low, high = clip_range(given.config)
    moved = given.log_prob.detach().exp() - given.old_log_prob.exp()
    keep = torch.where(given.advantages > 0, moved <= high, moved >= -low)
    return _kept_policy_gradient(given, keep)


@policy_loss("dppo_kl")
def compute_policy_loss_dppo_kl(given: LossInputs) -> LossAndMetrics:
    """DPPO with binary KL (this token against all others): a token is dropped once the KL from
    the old policy is above `clip_ratio_high` (advantage > 0) or `clip_ratio_low` (otherwise),
    unless its gradient leads back towards the old policy."""
    low, high = clip_range(given.config)
    old, new = given.old_log_prob, given.log_prob.detach()
    divergence = _binary_kl(old, new)
    keep = torch.where(
        given.advantages > 0,
        (divergence <= high) | (new <= old),
        (divergence <= low) | (new >= old),
    )
    return _kept_policy_gradient(given, keep)


def _kept_policy_gradient(given: LossInputs, keep: Tensor) -> LossAndMetrics:
    """The policy gradient of the tokens to keep, weighed by their ratio as a constant, at most
    `clip_ratio_c`. The metrics count the tokens dropped (actor/pg_clipfrac) and those whose ratio
    was cut (actor/pg_clipfrac_lower)."""
    log_ratio = given.log_ratio().detach()
    ratio, most = bounded_exp(log_ratio), given.config.clip_ratio_c
    losses = -given.advantages * ratio.clamp(max=most) * given.kept_log_prob()
    loss = given.aggregate(losses.masked_fill(~keep, 0))
    return loss, given.metrics(-log_ratio, ~keep, keep & (ratio > most))


def _binary_kl(old_log_prob: Tensor, log_prob: Tensor) -> Tensor:
    """KL of (p, 1 - p) from the old to the new policy."""
    old, old_rest = old_log_prob, _log_of_the_rest(old_log_prob)
    return old.exp() * (old - log_prob) + old_rest.exp() * (old_rest - _log_of_the_rest(log_prob))


def _log_of_the_rest(log_prob: Tensor) -> Tensor:
    """log(1 - p), exact near p = 1 and finite at it."""
    below_one = log_prob.clamp(max=-torch.finfo(log_prob.dtype).tiny)
    return (-torch.expm1(below_one)).log()


# ---- Bypass mode: rollout correction inside the update


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
