"""Batches split so that every part is about the same work."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from caldera.errors import ConfigError, ProtocolError


def workload(length: int) -> int:
    """The cost of a sequence: linear for the matrices, quadratic for attention."""
    return 24576 * length + length**2


def get_seqlen_balanced_partitions(
    lengths: Sequence[int], k: int, equal_size: bool
) -> list[list[int]]:
    """Split the positions of `lengths` into k non-empty parts of about equal sums.

    Karmarkar-Karp: the two partial solutions whose sums are furthest apart are joined, the
    largest part of one with the smallest of the other, until a single one is left. With
    `equal_size`, every part gets the same number of positions.
    """
    count = len(lengths)
    if not 1 <= k <= count:
        raise ProtocolError(f"{count} sequences cannot be split into {k} non-empty parts")
    if equal_size and count % k:
        raise ProtocolError(f"{count} sequences cannot be split into {k} parts of equal size")
    # Joining complete solutions keeps the sizes of their parts equal, so with equal_size every
    # solution starts with one position a part.
    start_size = k if equal_size else 1
    ascending = sorted(range(count), key=lambda i: (lengths[i], i))
    solutions = [
        _Solution.of([_Part(lengths[i], [i]) for i in ascending[start : start + start_size]], k)
        for start in range(0, count, start_size)
    ]
    heap = [(-solution.spread, number, solution) for number, solution in enumerate(solutions)]
    heapq.heapify(heap)
    # The number decides between equal spreads, so that the result is deterministic.
    for number in range(len(heap), 2 * len(heap) - 1):
        joined = heapq.heappop(heap)[2].join(heapq.heappop(heap)[2], k)
        heapq.heappush(heap, (-joined.spread, number, joined))
    return [sorted(part.positions) for part in heap[0][2].parts]


@dataclass
class _Part:
    total: int
    positions: list[int]

    def join(self, other: _Part) -> _Part:
        return _Part(self.total + other.total, self.positions + other.positions)


@dataclass
class _Solution:
    """A split of some of the positions into at most k parts, the largest first."""

    parts: list[_Part]
    spread: int

    @classmethod
    def of(cls, parts: Iterable[_Part], k: int) -> _Solution:
        ordered = sorted(parts, key=attrgetter("total"), reverse=True)
        smallest = ordered[-1].total if len(ordered) == k else 0
        return cls(ordered, ordered[0].total - smallest)

    def join(self, other: _Solution, k: int) -> _Solution:
        # Largest with smallest: our part i meets their part k-1-i, where both exist. Parts that
        # meet nobody stay as they are, so no part is empty once there are k positions.
        overlap = max(0, len(self.parts) + len(other.parts) - k)
        alone = len(self.parts) - overlap
        met = zip(self.parts[alone:], reversed(other.parts), strict=False)
        joined = [ours.join(theirs) for ours, theirs in met]
        rest = other.parts[: len(other.parts) - overlap]
        return _Solution.of([*self.parts[:alone], *joined, *rest], k)


def balance_partitions(lengths: Sequence[int], dp_size: int, together: int = 1) -> list[list[int]]:
    """One part a data-parallel rank, of equal size and about equal work.

    Within a part the short sequences stand at both ends and the long ones in the middle. Each
    `together` consecutive sequences are one: a part has all of them, side by side.
    """
    work = _sums([workload(n) for n in lengths], together)
    sizes = _sums(lengths, together)
    parts = get_seqlen_balanced_partitions(work, dp_size, equal_size=True)
    arranged = [_small_ends(part, [sizes[i] for i in part]) for part in parts]
    return _members(arranged, together)


def log_seqlen_unbalance(
    lengths: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str = "global_seqlen"
) -> dict[str, float]:
    """Tokens a rank, of the batch in its old order and of the balanced parts."""
    size = len(lengths) // len(partitions)
    before = [sum(lengths[rank * size : (rank + 1) * size]) for rank in range(len(partitions))]
    after = [sum(lengths[i] for i in part) for part in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(lengths) / len(partitions),
    }


def micro_batches_by_tokens(
    lengths: Sequence[int], max_tokens: int, min_count: int = 1, together: int = 1
) -> list[list[int]]:
    """As few micro-batches as fit `max_tokens` each, but at least `min_count`, of equal work.

    Ranks that must agree on a number take the largest of theirs as everybody's `min_count`: the
    number that comes back is exactly the larger of `min_count` and the one without it. The
    micro-batches with the least work stand at both ends. Each `together` consecutive sequences
    are in the same one, side by side.
    """
    work = _sums([workload(n) for n in lengths], together)
    lengths = _sums(lengths, together)
    longest = max(lengths)
    if longest > max_tokens:
        what = "a sequence" if together == 1 else f"a group of {together} sequences"
        raise ConfigError(
            f"{what} of {longest} tokens does not fit the budget of {max_tokens} tokens a "
            "micro-batch; raise the max_token_len_per_gpu of this role"
        )
    count = min(len(lengths), max(1, -(-sum(lengths) // max_tokens)))
    parts = get_seqlen_balanced_partitions(work, count, equal_size=False)
    while not _fit(parts, lengths, max_tokens):  # ends at one sequence a part
        # Steps of one until there are many parts, where so many attempts would take seconds.
        count = min(len(lengths), count + 1 + count // 64)
        parts = get_seqlen_balanced_partitions(work, count, equal_size=False)
    if len(parts) < min_count:
        fitting = parts
        parts = get_seqlen_balanced_partitions(work, min_count, equal_size=False)
        # The heuristic can miss the budget with more parts where it met it with fewer.
        if not _fit(parts, lengths, max_tokens):
            parts = _split_heaviest(fitting, work, min_count)
    totals = [sum(work[i] for i in part) for part in parts]
    arranged = [parts[position] for position in _small_ends(range(len(parts)), totals)]
    return _members(arranged, together)


def _sums(values: Sequence[int], together: int) -> list[int]:
    """Of each group of consecutive values."""
    if len(values) % together:
        raise ProtocolError(f"{len(values)} sequences are not groups of {together}")
    return [sum(values[start : start + together]) for start in range(0, len(values), together)]


def _members(parts: list[list[int]], together: int) -> list[list[int]]:
    """Groups replaced by the sequences that they consist of."""
    return [[group * together + i for group in part for i in range(together)] for part in parts]


def _fit(parts: list[list[int]], lengths: Sequence[int], max_tokens: int) -> bool:
    return all(sum(lengths[i] for i in part) <= max_tokens for part in parts)


def _split_heaviest(parts: list[list[int]], work: Sequence[int], count: int) -> list[list[int]]:
    """Halve the heaviest part again and again until there are `count`."""
    parts = list(parts)
    while len(parts) < count:
        heaviest = max((p for p in parts if len(p) > 1), key=lambda p: sum(work[i] for i in p))
        parts.remove(heaviest)
        halves = get_seqlen_balanced_partitions([work[i] for i in heaviest], 2, equal_size=False)
        parts += [[heaviest[i] for i in half] for half in halves]
    return parts


def micro_batches_by_count(n: int, size: int, together: int = 1) -> list[list[int]]:
    """Consecutive micro-batches of `size` sequences, the last one possibly smaller.

    Each `together` consecutive sequences are in the same one.
    """
    if size < 1:
        raise ConfigError(f"a micro-batch must hold at least 1 sequence; got a size of {size}")
    if n % together or size % together:
        raise ProtocolError(f"{n} sequences, {size} at a time, are not groups of {together}")
    return [list(range(start, min(start + size, n))) for start in range(0, n, size)]


def _small_ends(items: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The items with the small ones at both ends and the largest in the middle."""
    arranged: deque[int] = deque()
    for _, item in sorted(zip(sizes, items, strict=True), reverse=True):
        # From the middle outwards, the next smaller one on the side that is shorter.
        if len(arranged) % 2:
            arranged.append(item)
        else:
            arranged.appendleft(item)
    return list(arranged)
