"""Generalised advantage estimation, and PF-PPO, which resamples a batch for it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from caldera.config.estimators import AdvantageEstimator
from caldera.core_algos.advantages.base import register_adv_est
from caldera.core_algos.advantages.tokens import (
    KeptTokens,
    Moments,
    in_row_blocks,
    whiten_in_place,
)
from caldera.errors import ConfigError, DataError

if TYPE_CHECKING:
    from caldera.config.algorithm import AlgorithmConfig


# ---- Discounted sums from the end of a response to its beginning

_float_range = partial(torch.arange, dtype=torch.float64)  # powers of integers are float32
_CHUNK = 32  # tokens that one product with a matrix of powers sums up


def reverse_scan(addends: Tensor, decay: float) -> Tensor:
    """y_t = addend_t + decay * y_{t+1} along the last dimension of (B, T), zero beyond the end.

    No loop over tokens: every chunk is summed by a product with a triangular matrix of powers,
    then the first sums of the chunks are scanned in the same way, with the decay of a chunk, and
    each chunk adds what comes after it. Powers of a decay in [0, 1] never overflow, so that this
    is exact to rounding for every decay.
    """
    if decay == 1:
        return addends.flip(-1).cumsum(-1).flip(-1)
    batch, width = addends.shape
    if width <= _CHUNK:
        return addends @ _powers(width, decay, addends)
    if short := -width % _CHUNK:
        addends = functional.pad(addends, (0, short))
    chunks = addends.reshape(batch, -1, _CHUNK)  # (B, N, C)
    sums = chunks @ _powers(_CHUNK, decay, addends)
    firsts = reverse_scan(sums[:, :, 0], decay**_CHUNK)  # (B, N), whole sums
    following = functional.pad(firsts[:, 1:], (0, 1)).unsqueeze(-1)  # (B, N, 1)
    distance = _float_range(_CHUNK, 0, -1, device=addends.device)  # to the next chunk's first
    sums.addcmul_(following, (decay**distance).to(addends.dtype))
    return sums.view(batch, -1)[:, :width]


def _powers(size: int, decay: float, like: Tensor) -> Tensor:
    """(T, T): what place j adds to the sum at place i, decay^(j - i), in row j and column i."""
    places = _float_range(size, device=like.device)
    distance = places.unsqueeze(-1) - places
    return (decay ** distance.clamp(min=0)).tril().to(like.dtype)


@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor,  # (B, R)
    values: Tensor,  # (B, R)
    response_mask: Tensor,  # (B, R)
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the tokens of the mask, as if they were adjacent.

    Tool and user tokens amid a response are no actions: the recursion passes over them, and a
    reward on one of them counts as one on the nearest earlier action. The returns are advantage +
    value; the advantages are then whitened.
    """

    def rows(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        tokens = KeptTokens(mask)
        packed_values = tokens.pack(values)
        deltas = tokens.pack_rewards(rewards).sub_(packed_values)
        deltas[:, :-1].add_(packed_values[:, 1:], alpha=gamma)
        packed_advantages = reverse_scan(deltas, gamma * lam)
        advantages = tokens.unpack(packed_advantages)
        returns = tokens.unpack(packed_values.add_(packed_advantages))
        return advantages, returns, tokens.mask, *Moments.of(advantages, tokens.mask)

    advantages, returns, mask, *moments = in_row_blocks(
        rows, token_level_rewards, values, response_mask
    )
    return whiten_in_place(advantages, mask, Moments(*moments)), returns


@register_adv_est(AdvantageEstimator.GAE)
def _gae(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    config: AlgorithmConfig,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    return compute_gae_advantage_return(
        token_level_rewards, values, response_mask, gamma=config.gamma, lam=config.lam
    )


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
