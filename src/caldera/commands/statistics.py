"""Measures of several answers a prompt, with 95 % confidence intervals.

All are means over prompts. What k answers would give is computed for k drawn without replacement
from the n that are there, so nothing depends on their order:

    mean@n    the score of an answer
    pass@k    whether one of k answers passes, without bias (Chen et al., 2021)
    best@k    the score of the best of k answers
    maj@k     the score of the answer that most of k give; ties count by halves"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import comb, sqrt

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES = 10_000
VOTES = 1_000
"""Draws of k answers that estimate a majority, where the n are not all of them."""
EXACT_SIGN_FLIPS = 14
"""Up to so many prompts all sign flips are counted, beyond they are drawn."""
Z95 = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and where it may lie."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PromptScores:
    """What the answers to one prompt were worth."""

    scores: Floats  # (n,)
    passed: NDArray[np.bool_]  # (n,)
    predictions: tuple[str | None, ...] | None = None
    """What each answered, where that can be told."""


@dataclass(frozen=True)
class Comparison:
    """Two files over the same prompts: the first less the second."""

    prompts: int
    difference: Estimate
    p_value: float
    better: int
    """Prompts on which the first scores higher."""
    worse: int


def measures(prompts: Sequence[PromptScores], seed: int = 0) -> dict[str, Estimate]:
    """Every measure that the number of answers allows, by its name."""
    n = min(len(prompt.scores) for prompt in prompts)
    found = {f"mean@{n}": estimate([float(p.scores.mean()) for p in prompts], seed)}
    for k in sizes(n):
        found[f"pass@{k}"] = estimate([pass_at_k(p.passed, k) for p in prompts], seed)
    for k in sizes(n)[1:]:
        found[f"best@{k}"] = estimate([best_at_k(p.scores, k) for p in prompts], seed)
    if n > 1 and all(p.predictions is not None for p in prompts):
        for k in sizes(n)[1:]:
            rng = np.random.default_rng(seed)
            found[f"maj@{k}"] = estimate([majority_at_k(p, k, rng) for p in prompts], seed)
    return found


def sizes(n: int) -> list[int]:
    """1, 2, 4, 8, ... and n."""
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})


def pass_at_k(passed: NDArray[np.bool_], k: int) -> float:
    """The chance that at least one of k answers, drawn from these, passes."""
    n, failing = len(passed), int((~passed).sum())
    return 1.0 - comb(failing, k) / comb(n, k)


def best_at_k(scores: Floats, k: int) -> float:
    """The expected best score of k answers, drawn from these."""
    n = len(scores)
    ordered = np.sort(scores)
    # The i-th smallest is the best of k if the other k - 1 are among the i before it.
    weights = [comb(i, k - 1) / comb(n, k) for i in range(n)]
    return float(np.dot(ordered, weights))


def majority_at_k(prompt: PromptScores, k: int, rng: np.random.Generator) -> float:
    """The expected score of the most common answer among k, drawn from these."""
    assert prompt.predictions is not None
    n = len(prompt.scores)
    kinds = {kind: i for i, kind in enumerate(dict.fromkeys(prompt.predictions))}
    votes = np.array([kinds[kind] for kind in prompt.predictions])
    worth = np.array([prompt.scores[votes == i].mean() for i in range(len(kinds))])
    if k == n:
        draws = np.arange(n)[None]
    else:
        draws = rng.random((VOTES, n)).argpartition(k - 1, axis=1)[:, :k]
    counts = np.stack([(votes[draws] == i).sum(1) for i in range(len(kinds))], axis=1)
    leading = counts == counts.max(1, keepdims=True)  # (draws, kinds)
    return float(((leading * worth).sum(1) / leading.sum(1)).mean())


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean over prompts with its 95 % interval.

    Where each prompt has either 0 or 1 it is Wilson's, which does not collapse when all agree;
    otherwise prompts are drawn again and again with replacement (percentile bootstrap).
    """
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if np.isin(array, (0.0, 1.0)).all():
        return _wilson(mean, len(array))
    low, high = np.percentile(_resampled_means(array, seed), [2.5, 97.5])
    return Estimate(mean, float(low), float(high))


def _wilson(share: float, count: int) -> Estimate:
    z2 = Z95**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z95 / (1 + z2 / count) * sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return Estimate(share, max(0.0, centre - half), min(1.0, centre + half))


def _resampled_means(values: Floats, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    at_once = max(1, 10_000_000 // len(values))  # bounds the memory
    for start in range(0, RESAMPLES, at_once):
        count = min(at_once, RESAMPLES - start)
        means[start : start + count] = values[
            rng.integers(0, len(values), (count, len(values)))
        ].mean(1)
    return means


def compare(first: Sequence[float], second: Sequence[float], seed: int = 0) -> Comparison:
    """The mean scores of the same prompts in two files.

    The p-value is that of a paired permutation test: how often a difference as large as this one
    comes up when each prompt's difference gets a random sign.
    """
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    return Comparison(
        prompts=len(differences),
        difference=_difference(differences, seed),
        p_value=_sign_flip_test(differences, seed),
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
    )


def _difference(differences: Floats, seed: int) -> Estimate:
    low, high = np.percentile(_resampled_means(differences, seed), [2.5, 97.5])
    return Estimate(float(differences.mean()), float(low), float(high))


def _sign_flip_test(differences: Floats, seed: int) -> float:
    nonzero = differences[differences != 0]  # a sign changes nothing about the others
    observed = abs(nonzero.sum())
    tolerance = 1e-12 * max(1.0, np.abs(nonzero).sum())
    threshold = observed - tolerance
    if len(nonzero) <= EXACT_SIGN_FLIPS:
        signs = np.array(list(product((-1.0, 1.0), repeat=len(nonzero))))
        return float((np.abs(signs @ nonzero) >= threshold).mean())
    rng = np.random.default_rng(seed)
    signs = rng.integers(0, 2, (RESAMPLES, len(nonzero)), dtype=np.int8) * 2 - 1
    # The observed signs are one of the draws, so that no p-value is 0.
    as_large = int((np.abs(signs @ nonzero) >= threshold).sum())
    return (as_large + 1) / (RESAMPLES + 1)
