"""Choosing the next token of many sequences at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from caldera.models.exact_norm import in_exactness
from caldera.rollout.native.blocks import IntArray

GROUP = 64
TILE = GROUP * GROUP
"""A token is drawn by three exponential races (Gumbel-max): of tiles, groups and tokens."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class SamplingRows:
    """The parameters of a batch's rows, one entry a row."""

    temperature: NDArray[np.float64]
    top_k: IntArray
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    seed: NDArray[np.uint64]
    generated: IntArray
    """Tokens that the row's request has already."""

    @property
    def has_filters(self) -> bool:
        """Whether some tokens cannot be drawn in some row."""
        kept_all = (self.top_k < 1) & (self.top_p >= 1) & (self.min_p <= 0)
        return not bool((kept_all | (self.temperature == 0)).all())


@dataclass(frozen=True)
class Penalties:
    """The penalties of some rows of a batch for the tokens that they hold."""

    rows: IntArray  # (R,) of the batch
    repetition: NDArray[np.float32]  # (R,)
    presence: NDArray[np.float32]  # (R,)
    frequency: NDArray[np.float32]  # (R,)
    tokens: IntArray  # (R, L) of prompt and completion
    prompts: IntArray  # (R,) how many of them are the prompt's
    lengths: IntArray  # (R,) how many there are


class Sampled(NamedTuple):
    tokens: Tensor  # (B,)
    log_probs: Tensor  # (B,)
    logits: Tensor  # (B, V) whose log-probs these are

    def packed(self) -> Tensor:
        """Tokens as int32 and log-probs as float32 in the same bits, (2, B)."""
        log_probs = self.log_probs.float().view(torch.int32)
        return torch.stack([self.tokens.to(torch.int32), log_probs])


def draws(seed: NDArray[np.uint64], counter: IntArray) -> NDArray[np.uint32]:
    """Random words that are pure functions of seed and counter: splitmix64."""
    with np.errstate(over="ignore"):
        state = _mix(seed) + (counter.astype(np.uint64) + np.uint64(1)) * GOLDEN
        return (_mix(state) >> np.uint64(32)).astype(np.uint32)


def exponentials(words: NDArray[np.uint32], race: int, count: int) -> NDArray[np.float32]:
    """Exponentially distributed numbers (B, count), pure functions of word (B,), race and place.

    Like `_exponential` in `cuda/step_kernels.py`.
    """
    place = np.arange(count, dtype=np.uint32) + np.uint32(race << 16)
    state = words[:, None] + place * np.uint32(0x9E3779B9)
    state = (state ^ (state >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    state = (state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    state ^= state >> np.uint32(16)
    uniform = ((state >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)
    numbers: NDArray[np.float32] = -np.log(uniform)
    return numbers


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def sample(
    logits: Tensor, rows: SamplingRows, raw_log_probs: bool, penalties: Penalties | None = None
) -> Sampled:
    """A token and its log-prob for each row of logits (B, V).

    The log-prob is that after penalties, temperature and filters, or the plain logits' if asked
    for. A greedy row has neither temperature nor filters. The choice for a row depends on nothing
    but that row.
    """
    plain = logits
    if penalties is not None:
        logits = penalise(logits, penalties)
    greedy = rows.temperature == 0
    if greedy.all():
        tokens = logits.argmax(-1)
        return _with_log_probs(tokens, plain if raw_log_probs else logits)
    scaled = _scale(logits, np.where(greedy, 1.0, rows.temperature).astype(np.float32))
    scaled = _filter(
        scaled,
        np.where(greedy, -1, rows.top_k),
        np.where(greedy, 1.0, rows.top_p),
        np.where(greedy, 0.0, rows.min_p),
    )
    largest = scaled.amax(-1, keepdim=True)
    weights = scaled - largest
    weights = weights.exp() if in_exactness() else weights.exp_()
    tokens, total = _draw(weights, draws(rows.seed, rows.generated))
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(logits.device), logits.argmax(-1), tokens)
    if raw_log_probs or in_exactness():
        return _with_log_probs(tokens, plain if raw_log_probs else scaled)
    return _with_log_probs(tokens, scaled, total.log().to(scaled.dtype) + largest.squeeze(-1))


def penalise(logits: Tensor, penalties: Penalties) -> Tensor:
    """Logits (B, V) less the penalties of their rows."""
    device, vocabulary = logits.device, logits.shape[-1]
    rows, tokens, prompts, lengths, repetition, presence, frequency = (
        torch.from_numpy(array).to(device)
        for array in (
            penalties.rows,
            penalties.tokens,
            penalties.prompts,
            penalties.lengths,
            penalties.repetition,
            penalties.presence,
            penalties.frequency,
        )
    )
    places = torch.arange(tokens.shape[1], device=device)
    known = (places < lengths[:, None]).to(logits.dtype)  # (R, L)
    sampled = known * (places >= prompts[:, None])
    empty = logits.new_zeros(len(rows), vocabulary)
    seen = empty.scatter_add(1, tokens, known) > 0
    count = empty.scatter_add(1, tokens, sampled)  # (R, V)
    chosen = logits.index_select(0, rows)
    factor = repetition[:, None]
    repeated = torch.where(chosen > 0, chosen / factor, chosen * factor)
    chosen = torch.where(seen, repeated, chosen)
    chosen = chosen - frequency[:, None] * count - presence[:, None] * (count > 0)
    return logits.index_copy(0, rows, chosen)


def _with_log_probs(tokens: Tensor, logits: Tensor, normaliser: Tensor | None = None) -> Sampled:
    """`normaliser` (B,): the logarithm of the sum of the logits' exponentials, if it is known."""
    said = logits.gather(-1, tokens[:, None]).squeeze(-1)
    normaliser = logits.logsumexp(-1) if normaliser is None else normaliser
    return Sampled(tokens, said - normaliser, logits)


def _scale(logits: Tensor, temperature: NDArray[np.float32]) -> Tensor:
    if (temperature == 1).all():
        return logits
    return logits / torch.from_numpy(temperature).to(logits.device)[:, None]


def _filter(
    logits: Tensor, top_k: IntArray, top_p: NDArray[np.float64], min_p: NDArray[np.float64]
) -> Tensor:
    """Logits with those of filtered tokens at minus infinity; the same tensor if none are."""
    if min_p.any():
        with np.errstate(divide="ignore"):
            share = torch.from_numpy(np.log(min_p)).to(logits.device, logits.dtype)  # (B,)
        least = logits.amax(-1, keepdim=True) + share[:, None]
        logits = logits.masked_fill(logits < least, float("-inf"))
    vocabulary = logits.shape[-1]
    top_k = np.where((top_k < 1) | (top_k > vocabulary), vocabulary, top_k)
    limited = (top_k < vocabulary) | (top_p < 1)
    if not limited.any():
        return logits
    if limited.all():
        return _filter_rows(logits, top_k, top_p)
    chosen = torch.from_numpy(limited.nonzero()[0]).to(logits.device)
    filtered = _filter_rows(logits.index_select(0, chosen), top_k[limited], top_p[limited])
    return logits.index_copy(0, chosen, filtered)


def _filter_rows(logits: Tensor, top_k: IntArray, top_p: NDArray[np.float64]) -> Tensor:
    """First the k most likely, then the fewest of these that have the probability p.

    Both are thresholds on the logits, so that equal logits are kept together: what is kept depends
    on no order among them.
    """
    device = logits.device
    width = int(top_k.max())
    values = logits.topk(width).values  # (B, W), descending
    kept = torch.arange(width, device=device) < torch.from_numpy(top_k).to(device)[:, None]
    probs = values.double().masked_fill(~kept, float("-inf")).softmax(-1)
    before = probs.cumsum(-1) - probs
    kept &= before < torch.from_numpy(top_p).to(device)[:, None]
    last = (kept.sum(-1, keepdim=True) - 1).clamp(min=0)  # the most likely token always stays
    return logits.masked_fill(logits < values.gather(-1, last), float("-inf"))


def _draw(weights: Tensor, words: NDArray[np.uint32]) -> tuple[Tensor, Tensor]:
    """A token by its weight, and the sum of the weights (B, V), (B,) each.

    An exponential race (Gumbel-max): the largest weight over an exponentially distributed number
    wins, with a probability that is its share. Unlike a search among cumulated weights, in which
    the rounding of one shifts all behind it, another choice takes two that were as good as equal.
    """
    if missing := -weights.shape[-1] % TILE:
        weights = F.pad(weights, (0, missing))
    tiles = weights.unflatten(-1, (-1, GROUP, GROUP))  # (B, tiles, groups, tokens)
    groups = tiles.sum(-1)
    sums = groups.sum(-1)
    rows = torch.arange(len(weights), device=weights.device)
    tile = _race(sums, words, 0)
    group = _race(groups[rows, tile], words, 1)
    token = _race(tiles[rows, tile, group], words, 2)
    return (tile * GROUP + group) * GROUP + token, sums.sum(-1, dtype=torch.float64)


def _race(weights: Tensor, words: NDArray[np.uint32], number: int) -> Tensor:
    """The winner of each row (B, n) of an exponential race."""
    noise = torch.from_numpy(exponentials(words, number, weights.shape[-1])).to(weights.device)
    return (weights / noise).argmax(-1)
