"""Who runs next: prompts wait, running sequences are decoded together, late ones may be evicted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from caldera.rollout.base import FinishReason
from caldera.rollout.native.blocks import (
    NO_PAGES,
    PAGE_SIZE,
    BlockManager,
    IntArray,
    extend_block_hashes,
    pages_for,
)
from caldera.rollout.native.running import NO_ROW, Running, Sequence
from caldera.rollout.native.steps import Decode, Prefill, Step

ADMISSION_SHARE = 8
"""Sequences are admitted when an eighth of the rows is free: a prefill pass stops the decoding."""


@dataclass
class _Plan:
    """Rows to run and to sample for, as they are being gathered."""

    rows: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # tokens of each that are run
    sampled: list[int] = field(default_factory=list)  # rows to sample a token for
    leaders: list[int] = field(default_factory=list)  # the place in `rows` of what was run for each
    copies: list[tuple[int, int]] = field(default_factory=list)  # pages, (source, target)
    tokens: int = 0
    wanting: int = 0  # sequences that run, or will, and may want one more page

    @property
    def ends_a_row(self) -> bool:
        """Whether the newest of the planned rows is run to its end."""
        return bool(self.leaders) and self.leaders[-1] == len(self.rows) - 1

    def run(self, row: int, count: int, to_the_end: bool) -> None:
        self.rows.append(row)
        self.counts.append(count)
        self.tokens += count
        if to_the_end:
            self.follow(row, None)

    def follow(self, row: int, copy: tuple[int, int] | None) -> None:
        """Sample for a row from the logits of the newest planned row."""
        self.sampled.append(row)
        self.leaders.append(len(self.rows) - 1)
        self.copies.extend([copy] if copy else [])


class Scheduler:
    """Steps that are either a prefill of waiting sequences or a decoding of all running ones.

    With `chunked`, a step is both: every sequence that can be decoded is, and prompts take what is
    left of the tokens that a step may have, in pieces if they must. With `mixes`, whole prompts run
    beside the decoding, which does not stop for the few that trickle in.

    The cache's pages are not reserved for the longest a sequence may get. When they run out, the
    sequence that arrived last gives its pages back and waits, to be prefilled again with what was
    sampled for it. With `prefixes`, pages are found again by what is in them.
    """

    def __init__(
        self,
        running: Running,
        blocks: BlockManager,
        max_batched_tokens: int,
        chunked: bool = False,
        prefixes: bool = False,
        mixes: bool = False,
    ) -> None:
        self.preemptions = 0
        self.version = 0
        """Of the weights that sample now."""
        self._running = running
        self._blocks = blocks
        self._max_batched_tokens = max_batched_tokens
        self._chunked = chunked
        self._prefixes = prefixes
        self._mixes = mixes
        self._batch_of_admissions = max(1, running.free_rows // ADMISSION_SHARE)
        self._waiting: deque[Sequence] = deque()

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Let sequences wait; those with one prompt are together, behind the first of them."""
        groups: dict[bytes, list[Sequence]] = {}
        for sequence in sequences:
            groups.setdefault(sequence.prompt.tobytes(), []).append(sequence)
        for members in groups.values():
            self._waiting.extend(members)

    def schedule(self) -> Step:
        """The next step."""
        if self._chunked:
            return self._mix()
        enough_rows = min(len(self._waiting), self._batch_of_admissions)
        if self._waiting and (not len(self._running) or self._running.free_rows >= enough_rows):
            if self._mixes and len(self._running):
                return self._mix()
            plan = _Plan()
            self._admit(plan, self._max_batched_tokens)
            if plan.rows:
                return self._packed(plan)
        return self._decode()

    def update(
        self,
        step: Step,
        positions: IntArray,
        alive: NDArray[np.bool_],
        tokens: IntArray,
        log_probs: NDArray[np.float32],
    ) -> list[Sequence]:
        """Take in the tokens sampled for a step's rows; returns the sequences that are finished.

        `positions` is where the tokens belong. Rows that are not `alive` have another sequence by
        now, or none.
        """
        rows = step.rows[alive]
        recorded = self._running.record(rows, positions[alive], tokens[alive], log_probs[alive])
        if self._prefixes and isinstance(step, Prefill):
            for row in np.setdiff1d(step.run[step.counts > 1], step.rows[~alive]).tolist():
                self._keep(row)
        finished = []
        reasons: tuple[FinishReason, FinishReason] = ("stop", "length")
        for ended, reason in zip(recorded, reasons, strict=True):
            for sequence in self._release(ended) if len(ended) else ():
                sequence.finish_reason = reason
                finished.append(sequence)
        return finished

    @property
    def can_go_on(self) -> bool:
        """Whether there is something to run, and nobody need be evicted for it.

        Who waits does not count: admission is for when all that was sampled is known.
        """
        running, order = self._running, self._running.order
        lacking = running.length[order] - running.cached[order]
        growing = running.may_grow(order)
        ready = order[(lacking == 1) & growing]
        wanting = (self._blocks.owned[ready] * PAGE_SIZE == running.cached[ready]).sum()
        return bool((lacking[growing] > 0).any() and wanting <= self._blocks.free_pages)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, with all that was sampled for it."""
        if sequence.row == NO_ROW:
            self._waiting.remove(sequence)
        else:
            self._release(np.array([sequence.row]))

    def restart(self) -> None:
        """Let all that run wait, in their order: what the cache holds is worth nothing any more."""
        if len(self._running):
            rows = self._running.order
            self._waiting.extendleft(reversed(self._release(rows)))
        self._blocks.forget()

    # ---- admission

    def _admit(self, plan: _Plan, budget: int) -> None:
        """Plan as many waiting sequences as tokens, rows and pages allow."""
        if not self._waiting:
            return
        order = self._running.order
        plan.wanting = int((self._running.max_pages[order] > self._blocks.owned[order]).sum())
        while self._waiting and self._running.free_rows:
            sequence = self._waiting[0]
            leader = self._running.at(plan.rows[-1]) if plan.ends_a_row else None
            if leader is not None and _same_tokens(leader, sequence):
                if not self._fork(plan, leader, sequence):
                    return
            elif not self._begin(plan, sequence, budget):
                return
            plan.wanting += sequence.wants_pages

    def _fork(self, plan: _Plan, leader: Sequence, sequence: Sequence) -> bool:
        length = sequence.prefill_length
        if not self._fits(plan, sequence, length % PAGE_SIZE > 0):
            return False
        row = self._running.admit(self._waiting.popleft())
        self._running.cached[row] = length
        plan.follow(row, self._blocks.fork(leader.row, row, length))
        return True

    def _begin(self, plan: _Plan, sequence: Sequence, budget: int) -> bool:
        """Plan the first run of a sequence, from where its pages are not known; False if it must
        wait."""
        length = sequence.prefill_length
        known = self._known_pages(sequence)
        start = len(known) * PAGE_SIZE
        count = length - start
        if self._chunked:
            count = min(count, budget - plan.tokens)
        elif plan.rows and plan.tokens + count > budget:
            return False
        in_use = int((self._blocks.references[known] > 0).sum()) if len(known) else 0
        if count < 1 or not self._fits(plan, sequence, pages_for(length) - in_use):
            return False
        row = self._running.admit(self._waiting.popleft())
        self._blocks.allocate(row, length, known)
        self._running.cached[row] = start
        plan.run(row, count, start + count == length)
        return True

    def _known_pages(self, sequence: Sequence) -> IntArray:
        """Pages that hold the start of the sequence; its last token is always run."""
        if not self._prefixes or sequence.lacks_prompt_log_probs:
            return NO_PAGES
        full = (sequence.prefill_length - 1) // PAGE_SIZE
        extend_block_hashes(sequence.block_hashes, sequence.prefill_ids(), full)
        return self._blocks.find(sequence.block_hashes[:full])

    def _fits(self, plan: _Plan, sequence: Sequence, needed: int) -> bool:
        """Whether a page is left for each that will want one, so that none is evicted at once."""
        if len(self._running):
            needed += plan.wanting + sequence.wants_pages
        return needed <= self._blocks.free_pages

    # ---- steps

    def _mix(self) -> Step:
        """All that can be decoded, then prompts that have begun, then prompts that wait."""
        running = self._running
        ready = self._ready()
        plan = _Plan()
        budget = max(self._max_batched_tokens - len(ready), PAGE_SIZE)
        begun = running.order[running.cached[running.order] < running.length[running.order] - 1]
        for row in begun.tolist():
            rest = int(running.length[row] - running.cached[row])
            count = min(rest, budget - plan.tokens)
            if count > 0:
                plan.run(row, count, count == rest)
        self._admit(plan, budget)
        if not plan.rows:
            return self._decode(ready)
        return self._packed(plan, ready)

    def _packed(self, plan: _Plan, ready: IntArray | None = None) -> Prefill:
        """A step of the runs that were planned, behind the rows that are ready to be decoded."""
        running, blocks = self._running, self._blocks
        decoded = [] if ready is None else ready.tolist()
        rows = np.array(decoded + plan.rows, dtype=np.int64)
        counts = np.array([1] * len(decoded) + plan.counts, dtype=np.int64)
        starts = running.cached[rows]
        ends = np.cumsum(counts)
        owners = np.repeat(rows, counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)
        running.cached[rows] += counts
        leaders = np.array(plan.leaders, dtype=np.int64) + len(decoded)
        lengths = running.cached[rows]
        return Prefill(
            rows=np.array(decoded + plan.sampled, dtype=np.int64),
            token_ids=running.tokens(owners, positions),
            slots=blocks.slots(owners, positions),
            run=rows,
            counts=counts,
            ends=lengths,
            tables=blocks.tables[rows, : pages_for(int(lengths.max()))],
            leaders=np.concatenate([np.arange(len(decoded)), leaders]),
            page_copies=np.array(plan.copies, dtype=np.int64).reshape(-1, 2),
            tables_of_rows=blocks.tables[decoded + plan.sampled],
        )

    def _ready(self) -> IntArray:
        """The rows that lack one token only, each with a page for it."""
        running, blocks = self._running, self._blocks
        while True:
            lacking = running.length[running.order] - running.cached[running.order]
            rows: IntArray = running.order[(lacking == 1) & running.may_grow(running.order)]
            wanting = rows[blocks.owned[rows] * PAGE_SIZE == running.cached[rows]]
            if len(wanting) <= blocks.free_pages:
                blocks.append(wanting)
                return rows
            self._preempt(running.order[-1:])

    def _decode(self, ready: IntArray | None = None) -> Decode:
        running, blocks = self._running, self._blocks
        rows = self._ready() if ready is None else ready
        positions = running.cached[rows]
        running.cached[rows] += 1
        return Decode(
            rows=rows,
            token_ids=running.tokens(rows, positions),
            slots=blocks.slots(rows, positions),
            ends=positions + 1,
            tables=blocks.tables[rows, : pages_for(int(positions.max()) + 1)],
        )

    # ---- leaving

    def _preempt(self, row: IntArray) -> None:
        assert len(self._running) > 1, "each request fits into the cache alone"
        self._waiting.extendleft(self._release(row))
        self.preemptions += 1

    def _release(self, rows: IntArray) -> list[Sequence]:
        for row in rows.tolist():
            if self._prefixes:
                self._keep(row)
            self._blocks.free(row)
        return self._running.release(rows, self.version)

    def _keep(self, row: int) -> None:
        """Let the full pages of a row be found."""
        running = self._running
        block_hashes = running.at(row).block_hashes
        full = int(running.cached[row]) // PAGE_SIZE
        positions = np.arange(full * PAGE_SIZE)
        extend_block_hashes(
            block_hashes, running.tokens(np.full(len(positions), row), positions), full
        )
        self._blocks.keep(row, block_hashes[:full])


def _same_tokens(one: Sequence, other: Sequence) -> bool:
    """Whether the run of one has all results that the other needs."""
    return not (one.token_ids or other.token_ids or other.lacks_prompt_log_probs) and (
        one.prompt.tobytes() == other.prompt.tobytes()
    )
