"""How far the trained and the sampling policy are apart.

    l = old_log_prob (trainer) - rollout_log_prob (sampler), a token, clamped to +-20
    T, S = minus the mean log-prob of a response, by trainer and by sampler (its log perplexity)

Means over tokens are over the mask; means over responses, over those that have a token.

    kl                mean over tokens of -l
    k3_kl             mean over tokens of e^l - 1 - l
    training_log_ppl  mean of T          training_ppl  mean of e^T
    rollout_log_ppl   mean of S          rollout_ppl   mean of e^S
    log_ppl_diff      mean of T - S, and its mean absolute value, largest and smallest
    ppl_ratio         mean of e^(T - S)
    chi2_token        mean over tokens of e^(2 l), less 1
    chi2_seq          mean over responses of e^(2 sum of l), less 1
"""

from __future__ import annotations

import math

from .basics import Matrix, kept, kept_of_all, mean
from .rollout_correction import log_ratios


def mismatch(
    old_log_prob: Matrix, rollout_log_prob: Matrix, response_mask: Matrix
) -> dict[str, float]:
    ratios = log_ratios(old_log_prob, rollout_log_prob)
    tokens = kept_of_all(ratios, response_mask)
    trainer: list[float] = []
    sampler: list[float] = []
    sums: list[float] = []
    for row, mask in enumerate(response_mask):
        if any(mask):
            trainer.append(-mean(kept(old_log_prob[row], mask)))
            sampler.append(-mean(kept(rollout_log_prob[row], mask)))
            sums.append(math.fsum(kept(ratios[row], mask)))
    differences = [t - s for t, s in zip(trainer, sampler, strict=True)]
    return {
        "kl": mean([-x for x in tokens]),
        "k3_kl": mean([math.exp(x) - 1 - x for x in tokens]),
        "training_log_ppl": mean(trainer),
        "training_ppl": mean([math.exp(x) for x in trainer]),
        "rollout_log_ppl": mean(sampler),
        "rollout_ppl": mean([math.exp(x) for x in sampler]),
        "log_ppl_diff": mean(differences),
        "log_ppl_abs_diff": mean([abs(x) for x in differences]),
        "log_ppl_diff_max": max(differences),
        "log_ppl_diff_min": min(differences),
        "ppl_ratio": mean([math.exp(x) for x in differences]),
        "chi2_token": mean([math.exp(2 * x) for x in tokens]) - 1,
        "chi2_seq": mean([math.exp(2 * x) for x in sums]) - 1,
    }
