"""Validation metrics: mean, best, worst and majority of several responses to the same prompt.

Metrics are per data source and variable, such as `acc`, and averaged over prompts, of which each
has N samples:

    mean@N, std@N           over the samples
    best@n/{mean,std}       of the best of n samples, for n in 2, 4, 8, ... and N
    worst@n/{mean,std}      of the worst of n samples
    maj@n/{mean,std}        of the answer (`pred`) that most of n samples give

What n samples would give is estimated by drawing them from the N, with replacement, many times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

DRAWS = 1000
PROMPTS_AT_ONCE = 64  # bounds the memory of a majority vote: 64 x 1000 x N floats

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
ValidationMetrics = dict[str, dict[str, dict[str, float]]]
"""By data source, variable and metric."""


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = 42,
) -> ValidationMetrics:
    """The metrics of all numeric variables in `infos_dict`, whose lists hold one item a sample.

    Samples with the same data source and uid answer the same prompt. A variable that some samples
    of a data source lack (None or NaN) gets only its mean there, over the samples that have it.
    """
    prompts: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, uid) in enumerate(zip(data_sources, sample_uids, strict=True)):
        prompts[source][uid].append(row)
    numbers = {
        name: numeric
        for name, items in infos_dict.items()
        if (numeric := _as_numbers(items)) is not None
    }
    votes = _as_votes(infos_dict.get("pred", [None] * len(sample_uids)))
    return {
        source: _source_metrics(list(rows_by_uid.values()), numbers, votes, seed)
        for source, rows_by_uid in prompts.items()
    }


def name_validation_metrics(metrics: ValidationMetrics) -> dict[str, float]:
    """Flat names: `val-core/{source}/{variable}/{metric}` for what matters, else `val-aux/...`.

    What matters is how well the core variable (`acc`, or else `reward`) did with the largest N:
    its mean, its majority vote and its best.
    """
    named: dict[str, float] = {}
    for source, variables in metrics.items():
        core_variable = "acc" if "acc" in variables else "reward"
        for variable, values in variables.items():
            largest = max(_sample_count(metric) for metric in values)
            for metric, value in values.items():
                is_core = (
                    variable == core_variable
                    and metric.startswith(("mean@", "maj@", "best@"))
                    and _sample_count(metric) == largest
                )
                section = "val-core" if is_core else "val-aux"
                named[f"{section}/{source}/{variable}/{metric}"] = value
    return named


def validation_turn_metrics(num_turns: Sequence[int]) -> dict[str, float]:
    """`val-aux/num_turns/{min,max,mean}` over all validation samples."""
    return {
        "val-aux/num_turns/min": float(np.min(num_turns)),
        "val-aux/num_turns/max": float(np.max(num_turns)),
        "val-aux/num_turns/mean": float(np.mean(num_turns)),
    }


def _as_numbers(items: Sequence[Any]) -> Floats | None:
    """The items as floats, NaN for None; or None if the variable is not numeric."""
    numeric = (bool, int, float, np.bool_, np.number)
    if not all(item is None or isinstance(item, numeric) for item in items):
        return None
    return np.array([np.nan if item is None else float(item) for item in items])


def _as_votes(predictions: Sequence[Any]) -> Integers:
    """Equal predictions as equal integers; -1 for None, which is a vote like any other."""
    codes: dict[str, int] = {}
    votes = [-1 if p is None else codes.setdefault(str(p), len(codes)) for p in predictions]
    return np.array(votes, dtype=np.int64)


def _source_metrics(
    prompts: list[list[int]], numbers: Mapping[str, Floats], votes: Integers, seed: int
) -> dict[str, dict[str, float]]:
    """The metrics of one data source, given the rows of each of its prompts."""
    source_rows = [row for rows in prompts for row in rows]
    present = {name: ~np.isnan(values[source_rows]) for name, values in numbers.items()}
    complete = {name: values for name, values in numbers.items() if present[name].all()}
    has_votes = bool((votes[source_rows] >= 0).any())

    per_prompt: dict[str, dict[str, list[Floats]]] = {
        name: defaultdict(list) for name in numbers if present[name].any()
    }
    for rows in _stack_by_count(prompts):  # (prompts, N)
        count = rows.shape[1]
        for name, metrics in per_prompt.items():
            metrics[f"mean@{count}"].append(_mean_of_present(numbers[name][rows]))
        if count == 1:
            continue
        for name, values in complete.items():
            per_prompt[name][f"std@{count}"].append(values[rows].std(axis=1))
        for size in _subset_sizes(count):
            draws = np.random.RandomState(seed).choice(count, size=(DRAWS, size), replace=True)
            winners = _majority_winners(votes[rows], draws) if has_votes else None
            for name, values in complete.items():
                for metric, results in _drawn_metrics(values[rows], draws, winners).items():
                    per_prompt[name][metric].append(results)
    return {
        name: {metric: float(np.concatenate(found).mean()) for metric, found in metrics.items()}
        for name, metrics in per_prompt.items()
    }


def _stack_by_count(prompts: list[list[int]]) -> list[Integers]:
    """The prompts' rows as matrices (prompts, N), one for each number of samples N."""
    by_count: dict[int, list[list[int]]] = defaultdict(list)
    for rows in prompts:
        by_count[len(rows)].append(rows)
    return [np.array(by_count[count], dtype=np.int64) for count in sorted(by_count)]


def _mean_of_present(values: Floats) -> Floats:
    """Each prompt's mean over the samples that are not NaN; prompts that have none are left out."""
    counts = (~np.isnan(values)).sum(axis=1)  # (prompts,)
    return np.asarray(np.nansum(values, axis=1)[counts > 0] / counts[counts > 0])


def _subset_sizes(count: int) -> list[int]:
    """2, 4, 8, ... below `count`, and `count` itself."""
    sizes = []
    size = 2
    while size < count:
        sizes.append(size)
        size *= 2
    return [*sizes, count]


def _drawn_metrics(values: Floats, draws: Integers, winners: Integers | None) -> dict[str, Floats]:
    """Mean and standard deviation over the draws, for each prompt.

    `values` is (prompts, N), `draws` (DRAWS, n), `winners` (prompts, DRAWS).
    """
    size = draws.shape[1]
    by_sample = np.ascontiguousarray(values.T)  # (N, prompts)
    best = by_sample[draws[:, 0]]  # (DRAWS, prompts)
    worst = best.copy()
    for drawn in draws.T[1:]:
        candidates = by_sample[drawn]
        np.maximum(best, candidates, out=best)
        np.minimum(worst, candidates, out=worst)
    outcomes = {f"best@{size}": best, f"worst@{size}": worst}
    if winners is not None:
        outcomes[f"maj@{size}"] = np.take_along_axis(values, winners, axis=1).T
    metrics: dict[str, Floats] = {}
    for name, outcome in outcomes.items():
        metrics[f"{name}/mean"] = outcome.mean(axis=0)
        metrics[f"{name}/std"] = outcome.std(axis=0)
    return metrics


def _majority_winners(votes: Integers, draws: Integers) -> Integers:
    """The sample that speaks for each draw's most frequent vote, as an index: (prompts, DRAWS).

    It is the first in the draw that voted so; of equally frequent votes, the one cast first wins.
    `votes` is (prompts, N), `draws` (DRAWS, n).
    """
    count, size = votes.shape[1], draws.shape[1]
    every_draw = np.arange(len(draws))
    times_drawn = np.zeros((len(draws), count))
    first_position = np.full((len(draws), count), float(size))  # `size` for samples not drawn
    for position in reversed(range(size)):
        times_drawn[every_draw, draws[:, position]] += 1
        first_position[every_draw, draws[:, position]] = position

    winners = np.empty((len(votes), len(draws)), dtype=np.int64)
    for start in range(0, len(votes), PROMPTS_AT_ONCE):
        part = slice(start, start + PROMPTS_AT_ONCE)
        same_vote = votes[part, :, None] == votes[part, None, :]  # (part, N, N)
        support = times_drawn @ same_vote.astype(np.float64)  # (part, DRAWS, N)
        # More support wins; among equals, the earlier position. A sample that was not drawn may
        # share a vote with one that was, and then stands behind it.
        winners[part] = (support * (size + 1) - first_position).argmax(axis=2)
    return winners


def _sample_count(metric: str) -> int:
    """The n of `best@n/mean`."""
    return int(metric.partition("@")[2].partition("/")[0])
