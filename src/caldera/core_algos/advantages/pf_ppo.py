"""PF-PPO: policy filtration, which draws the samples of a batch anew by their scores."""

from __future__ import annotations

import torch
from torch import Tensor

from caldera.errors import ConfigError, DataError

_LEAST_WEIGHT = 1e-8  # so that every sample can be drawn, and any batch drawn from


def compute_pf_ppo_weights(
    scores: Tensor, reweight_method: str = "pow", weight_pow: float = 2.0
) -> Tensor:
    """(B,) -> (B,) float64: the weight of each sample in the draw, from its score.

    pow: the score's size to the power of `weight_pow`. max_min: 1 for the best and the worst
    scores of the batch, 0 for the others. max_random: 0.4 for the best, 0.1 for the others.
    """
    if not scores.isfinite().all():
        raise DataError("algorithm.use_pf_ppo needs finite scores, and there is one that is not")
    scores = scores.double()
    if reweight_method == "pow":
        weights = scores.abs() ** weight_pow
    elif reweight_method == "max_min":
        weights = ((scores == scores.max()) | (scores == scores.min())).double()
    elif reweight_method == "max_random":
        weights = torch.full_like(scores, 0.1).masked_fill(scores == scores.max(), 0.4)
    else:
        raise ConfigError(
            f"algorithm.pf_ppo.reweight_method={reweight_method!r}: choose pow, max_min or"
            " max_random"
        )
    return weights.clamp(min=_LEAST_WEIGHT)


def compute_pf_ppo_indices(
    scores: Tensor,  # (B,)
    generator: torch.Generator,
    reweight_method: str = "pow",
    weight_pow: float = 2.0,
) -> Tensor:
    """(B,): the rows of the new batch, drawn with replacement in proportion to their weights."""
    weights = compute_pf_ppo_weights(scores, reweight_method, weight_pow)
    return torch.multinomial(weights, len(scores), replacement=True, generator=generator)
