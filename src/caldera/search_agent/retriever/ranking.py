"""Places of passages with their scores, the best first, and how two such lists become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy

Ranking = list[tuple[int, float]]
"""(place of a passage, its score), the best first; those of equal scores in the order of places."""
BLOCK = 64
FUSION_CONSTANT = 60
"""Of reciprocal rank fusion: how little the first ranks stand out."""


class Searcher(Protocol):
    """One way to search the passages of an index."""

    def search(self, queries: Sequence[str], topk: int) -> list[Ranking]: ...


def best(scores: numpy.ndarray[Any, Any], topk: int, above: float = -numpy.inf) -> Ranking:
    """The passages of the highest scores that are greater than `above`, out of all scores. (N,)"""
    places = numpy.flatnonzero((scores >= _bound(scores, topk)) & (scores > above))
    order = numpy.lexsort((places, -scores[places]))[:topk]
    return [(int(place), float(scores[place])) for place in places[order]]


def _bound(scores: numpy.ndarray[Any, Any], topk: int) -> float:
    """Not more than the score of rank `topk`, and not much less.

    Of blocks of scores, `topk` have a highest one that is at least this. Selecting among these few
    is much faster than among all scores, most of which are equal.
    """
    blocks = len(scores) // BLOCK
    if blocks <= topk:
        return -numpy.inf
    highest = scores[: blocks * BLOCK].reshape(blocks, BLOCK).max(axis=1)
    return float(numpy.partition(highest, blocks - topk)[blocks - topk])


def fused(rankings: Sequence[Ranking], topk: int) -> Ranking:
    """Reciprocal rank fusion: a passage gets 1 / (60 + its rank) from each list that has it."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, (place, _) in enumerate(ranking, start=1):
            scores[place] = scores.get(place, 0.0) + 1 / (FUSION_CONSTANT + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:topk]
