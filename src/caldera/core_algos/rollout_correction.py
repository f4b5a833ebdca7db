"""Rollout correction: training on samples whose sampler was not quite the policy.

The ratio of the two weights tokens or sequences, within bounds, or has them rejected
(`algorithm.rollout_correction`); how far they are apart is reported under `rollout_corr/`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from caldera.config.rollout_correction import (
    Rejection,
    WeightBounds,
    check_is_level,
    parse_rejections,
    parse_weight_bounds,
)
from caldera.core_algos.aggregation import masked_mean, masked_sum, zero_outside
from caldera.core_algos.policy_losses.base import MAX_LOG_RATIO, bounded_exp

Metrics = dict[str, Tensor]

PREFIX = "rollout_corr/"


def log_ratios_of(old_log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """l of each token, clamped to +-20; 0 outside the mask. All are (B, R)."""
    differences = zero_outside(old_log_prob - rollout_log_prob, mask)
    return differences.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def weight_metrics(ratios: Tensor, weights: Tensor, mask: Tensor, bounds: WeightBounds) -> Metrics:
    """`rollout_is_*`, of the ratios (before bounds and normalisation) but for two.

    `eff_sample_size` is of the weights as they are applied: (sum w)^2 / (n sum w^2), between 0 and
    1. `oob_ratio` is the share of tokens whose weight the bounds changed. Fractions `high` and
    `low` are relative to the bounds; where there is only an upper one, u, the lower is 1/u.
    """
    kept = mask.bool()
    lower = 1 / bounds.upper if bounds.lower is None else bounds.lower
    values = _token_and_sequence_spread(ratios, kept, lower, bounds.upper, neutral=1.0)
    for side in ("high", "low"):
        values[f"ratio_fraction_{side}"] = values.pop(f"fraction_{side}")

    outside = ratios > bounds.upper
    if bounds.lower is not None:
        outside = outside | (ratios < bounds.lower)
    values["oob_ratio"] = _share(outside, kept)

    total, squares = masked_sum(weights, kept), masked_sum(weights.square(), kept)
    size = total.square() / (kept.sum() * squares).clamp(min=1e-30)
    values["eff_sample_size"] = size
    return {f"{PREFIX}rollout_is_{name}": value for name, value in values.items()}


def rejection_metrics(
    rejection: Rejection, values: Tensor, passed: Tensor, mask: Tensor
) -> Metrics:
    """`rollout_rs_{statistic}_*`: the statistic, how often it was out of bounds, what that cost.

    `high` and `low` are sides of the statistic. For k1, which is -l, a high one is a low ratio.
    """
    kept = mask.bool()
    spread = _token_and_sequence_spread(values, kept, rejection.lower, rejection.upper, neutral=0.0)
    name = f"rollout_rs_{rejection.statistic}"
    metrics = {f"{PREFIX}{name}_{key}": value for key, value in spread.items()}
    return metrics | rejected_fractions(name, passed, mask)


def rejected_fractions(name: str, passed: Tensor, mask: Tensor) -> Metrics:
    """Share of the tokens that are rejected, and of the sequences that lose any."""
    kept = mask.bool()
    rejected = kept & ~passed
    return {
        f"{PREFIX}{name}_masked_fraction": _share(rejected, kept),
        f"{PREFIX}{name}_seq_masked_fraction": _share(rejected.any(-1), kept.any(-1)),
    }


@torch.no_grad()
def compute_offpolicy_metrics(
    old_log_prob: Tensor,  # (B, R), as are all tensors here
    rollout_log_prob: Tensor,
    response_mask: Tensor,
) -> Metrics:
    """How far trainer and sampler are apart, whether or not that is corrected; detached scalars.

    `kl` and `k3_kl` are means over tokens of k1 and k3. The log-perplexity of a sequence is minus
    the mean of its log-probs; `log_ppl_diff` is the trainer's less the sampler's and `ppl_ratio`
    its exponential. All of these are means over sequences, but for the extremes. `chi2` is the
    mean of the squared ratio less 1, of tokens and of whole sequences.
    """
    kept = response_mask.bool()  # (B, R)
    sequences = kept.any(-1)  # (B,)
    log_ratios = log_ratios_of(old_log_prob, rollout_log_prob, kept)
    training = -masked_mean(old_log_prob, kept, dim=-1)  # (B,)
    rollout = -masked_mean(rollout_log_prob, kept, dim=-1)
    difference = training - rollout
    sequence_ratios = bounded_exp(log_ratios.sum(-1))
    values = {
        "kl": masked_mean(-log_ratios, kept),
        "k3_kl": masked_mean(log_ratios.expm1() - log_ratios, kept),
        "training_ppl": masked_mean(bounded_exp(training), sequences),
        "training_log_ppl": masked_mean(training, sequences),
        "rollout_ppl": masked_mean(bounded_exp(rollout), sequences),
        "rollout_log_ppl": masked_mean(rollout, sequences),
        "log_ppl_diff": masked_mean(difference, sequences),
        "log_ppl_abs_diff": masked_mean(difference.abs(), sequences),
        "log_ppl_diff_max": _largest(difference, sequences),
        "log_ppl_diff_min": -_largest(-difference, sequences),
        "ppl_ratio": masked_mean(bounded_exp(difference), sequences),
        "chi2_token": masked_mean((2 * log_ratios).expm1(), kept),
        "chi2_seq": masked_mean(sequence_ratios.square() - 1, sequences),
    }
    return {f"{PREFIX}{name}": value for name, value in values.items()}


def _token_and_sequence_spread(
    values: Tensor, kept: Tensor, lower: float, upper: float, neutral: float
) -> Metrics:
    """Statistics over tokens, and as `seq_*` over sequences, each its tokens' mean.

    `neutral` is the value of a token on which both policies agree.
    """
    sequences = kept.any(-1)  # (B,)
    of_sequence = masked_mean(values, kept, dim=-1)
    spread = _spread(values, kept, lower, upper)
    for name, value in _spread(of_sequence, sequences, lower, upper).items():
        spread[f"seq_{name}"] = value
    spread["seq_max_deviation"] = _largest((of_sequence - neutral).abs(), sequences)
    return spread


def _spread(values: Tensor, kept: Tensor, lower: float, upper: float) -> Metrics:
    mean = masked_mean(values, kept)
    return {
        "mean": mean,
        "max": _largest(values, kept),
        "min": -_largest(-values, kept),
        "std": masked_mean((values - mean).square(), kept).sqrt(),
        "fraction_high": _share(values > upper, kept),
        "fraction_low": _share(values < lower, kept),
    }


def _share(chosen: Tensor, kept: Tensor) -> Tensor:
    return masked_mean(chosen.float(), kept)


def _largest(values: Tensor, kept: Tensor) -> Tensor:
    if values.numel() == 0:
        return values.new_zeros(())
    return values.masked_fill(~kept, -math.inf).amax().masked_fill(~kept.any(), 0)


# ---- Proxies of the variance of the policy gradient, without a gradient for each trajectory
#
# The gradient of log pi at a token, with respect to the logits, has the squared norm w = 1 - 2 pi +
# sum_v pi_v^2, where pi is the probability of the sampled token. Taking the tokens of a trajectory
# as independent, that of the whole trajectory has about W_i = sum_t w_t, or sum_t rho_t^2 w_t if
# importance weights rho multiply the loss. With A_i the mean advantage of its tokens and n
# trajectories:
#
#     proxy2_total_power      mean_i A_i^2 W_i: the mean squared norm of one trajectory's gradient
#     proxy1_signal_strength  squared norm of the mean gradient, which the update measures
#     proxy3_pure_noise       (proxy2 - proxy1) / (n - 1), at least 0: the variance of that mean
#     expected_a_squared      mean_i A_i^2
#     expected_w              mean_i W_i
#
# Signal and noise are comparable only where the gradient is that of the sum over tokens and the
# mean over trajectories (seq-mean-token-sum), and only as trends: W is measured at the logits, the
# norm of the gradient at the parameters.


@torch.no_grad()
def compute_variance_proxies(
    advantages: Tensor,  # (B, R), as are all tensors here
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    response_mask: Tensor,
    rollout_is_weights: Tensor | None = None,
    grad_norm: Tensor | float | None = None,
) -> dict[str, Tensor]:
    """The proxies under `variance_proxy/`; those of signal and noise only with `grad_norm`, the
    norm of the mean gradient. Detached scalar tensors; trajectories without a token do not count.
    """
    kept = response_mask.bool()
    trajectories = kept.any(-1)  # (B,)
    squared_norms = 1 - 2 * old_log_probs.exp() + sum_pi_squared
    if rollout_is_weights is not None:
        squared_norms = squared_norms * rollout_is_weights.square()
    w = masked_sum(squared_norms, kept, dim=-1)  # (B,)
    a_squared = masked_mean(advantages, kept, dim=-1).square()

    total_power = masked_mean(a_squared * w, trajectories)
    proxies = {
        "proxy2_total_power": total_power,
        "expected_a_squared": masked_mean(a_squared, trajectories),
        "expected_w": masked_mean(w, trajectories),
    }
    if grad_norm is not None:
        signal = torch.as_tensor(grad_norm, dtype=w.dtype, device=w.device).detach().square()
        others = (trajectories.sum() - 1).clamp(min=1)
        proxies["proxy1_signal_strength"] = signal
        proxies["proxy3_pure_noise"] = ((total_power - signal) / others).clamp(min=0)
    return {f"variance_proxy/{name}": value for name, value in proxies.items()}


# ---- Importance weights: how much more likely the trained policy is to sample what the sampler did


def importance_ratios(log_ratios: Tensor, mask: Tensor, level: str) -> Tensor:
    """e^l of each token, or e^(sum of l) of its sequence; 0 outside the mask. All are (B, R)."""
    if level == "sequence":
        log_ratios = log_ratios.sum(-1, keepdim=True).expand_as(log_ratios)
    return zero_outside(bounded_exp(log_ratios), mask)


def bound_weights(ratios: Tensor, bounds: WeightBounds) -> Tensor:
    """Truncated importance sampling with one bound, IcePop with two."""
    if bounds.lower is None:
        return ratios.clamp(max=bounds.upper)
    inside = (ratios >= bounds.lower) & (ratios <= bounds.upper)
    return ratios.masked_fill(~inside, 0)


def normalize_weights(weights: Tensor, mask: Tensor, level: str) -> Tensor:
    """Scale to a mean of 1 over tokens or over sequences; weights that are all 0 stay so."""
    kept = mask.bool()
    if level == "sequence":
        mean = masked_mean(masked_mean(weights, kept, dim=-1), kept.any(-1))
    else:
        mean = masked_mean(weights, kept)
    return weights / torch.where(mean > 0, mean, 1)


# ---- Rejection: statistics of the ratio by which tokens or whole sequences leave the loss token_k*
# of each token                  k1 = -l
#     seq_sum_k*   sum over a sequence's tokens   k2 = l^2 / 2
#     seq_mean_k*  their mean                     k3 = e^l - 1 - l
#     seq_max_k*   the largest of them
#
# Each of k1, k2 and k3 estimates KL(rollout || train) from samples of the rollout. k1 is signed; k2
# and k3 are not, and large wherever the two policies differ.

# Each is 0 where l is, and so outside the mask.
_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": torch.neg,
    "k2": lambda log_ratios: 0.5 * log_ratios.square(),
    "k3": lambda log_ratios: log_ratios.expm1() - log_ratios,
}


def rejection_statistic(log_ratios: Tensor, mask: Tensor, statistic: str) -> Tensor:
    """One of RS_STATISTICS, (B, R); one of a sequence stands on each of its tokens."""
    level, estimate = statistic.rsplit("_", 1)
    values = _ESTIMATES[estimate](log_ratios)
    if level == "token":
        return values
    if level == "seq_sum":
        of_sequence = values.sum(-1)
    elif level == "seq_mean":
        of_sequence = masked_mean(values, mask, dim=-1)
    else:
        # The column of zeros changes no maximum, as k2 and k3 are not negative, but gives one to
        # responses of width 0.
        of_sequence = torch.nn.functional.pad(values, (0, 1)).amax(-1)
    return zero_outside(of_sequence.unsqueeze(-1).expand_as(values), mask)


def within_bounds(values: Tensor, rejection: Rejection) -> Tensor:
    """Where the statistic is kept; not where it is NaN."""
    return (values >= rejection.lower) & (values <= rejection.upper)


@torch.no_grad()
def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,  # (B, R), as are all tensors here
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: object = 2.0,
    rollout_rs: str | None = None,
    rollout_rs_threshold: object = None,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor | None, Tensor, Metrics]:
    """(importance weights or None, response mask without what is rejected, metrics).

    `old_log_prob` are the trainer's: those of the batch in decoupled mode, those of the policy that
    is being updated in bypass mode. Weights are 0 outside `response_mask`, detached, and normalised
    over the rows given here, rejected ones included. Metrics, too, are of the mask as it comes in:
    detached scalar tensors on the device of their inputs; who logs them calls `.item()`.
    """
    metrics = compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    log_ratios = log_ratios_of(old_log_prob, rollout_log_prob, response_mask)
    weights = None
    if rollout_is is not None:
        check_is_level(rollout_is)
        bounds = parse_weight_bounds(rollout_is_threshold)
        ratios = importance_ratios(log_ratios, response_mask, rollout_is)
        weights = bound_weights(ratios, bounds)
        if rollout_is_batch_normalize:
            weights = normalize_weights(weights, response_mask, rollout_is)
        metrics |= weight_metrics(ratios, weights, response_mask, bounds)
    if rollout_rs is None:
        return weights, response_mask, metrics

    passed = torch.ones_like(response_mask, dtype=torch.bool)
    for rejection in parse_rejections(rollout_rs, rollout_rs_threshold):
        values = rejection_statistic(log_ratios, response_mask, rejection.statistic)
        passed_this = within_bounds(values, rejection)
        metrics |= rejection_metrics(rejection, values, passed_this, response_mask)
        passed &= passed_this
    metrics |= rejected_fractions("rollout_rs", passed, response_mask)
    return weights, zero_outside(response_mask, passed), metrics
