"""Who runs next: prompts wait, running sequences are decoded together, late ones may be evicted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caldera.rollout.native.attention import padding_order
from caldera.rollout.native.blocks import PAGE_SIZE, BlockManager, IntArray, pages_for
from caldera.rollout.native.running import Running, Sequence

ADMISSION_SHARE = 8
"""Sequences are admitted when an eighth of the rows is free: a prefill pass stops the decoding."""


@dataclass(frozen=True)
class Prefill:
    """Whole sequences to run through the model, packed."""

    rows: IntArray  # (B,) of the table, to sample a token for
    token_ids: IntArray  # (T,)
    slots: IntArray  # (T,) where their keys and values are kept
    lengths: list[int]  # of the sequences that are run: one a group of rows with the same prompt
    leaders: IntArray  # (B,) the sequence that was run for each row
    page_copies: IntArray  # (C, 2) pages to copy afterwards, as (source, target)


@dataclass(frozen=True)
class Decode:
    """The newest token of every running sequence."""

    rows: IntArray  # (B,)
    token_ids: IntArray  # (B,)
    slots: IntArray  # (B,)
    lengths: IntArray  # (B,) tokens of each sequence, this one included
    tables: IntArray  # (B, pages of the longest)


class Scheduler:
    """Steps that are either a prefill of waiting sequences or a decoding of all running ones.

    The cache's pages are not reserved for the longest a sequence may get. When they run out, the
    sequence that arrived last gives its pages back and waits, to be prefilled again with what was
    sampled for it.
    """

    def __init__(self, running: Running, blocks: BlockManager, max_batched_tokens: int) -> None:
        self.preemptions = 0
        self._running = running
        self._blocks = blocks
        self._max_batched_tokens = max_batched_tokens
        self._batch_of_admissions = max(1, running.free_rows // ADMISSION_SHARE)
        self._waiting: deque[Sequence] = deque()

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Let sequences wait; those of one group are together, behind the first of them."""
        groups: dict[int, list[Sequence]] = {}
        for sequence in sequences:
            groups.setdefault(sequence.group, []).append(sequence)
        for members in groups.values():
            self._waiting.extend(members)

    def has_work(self) -> bool:
        return bool(self._waiting) or len(self._running) > 0

    def schedule(self) -> Prefill | Decode:
        """The next step: a prefill where sequences can be admitted, otherwise a decoding."""
        enough_rows = min(len(self._waiting), self._batch_of_admissions)
        if self._waiting and (not len(self._running) or self._running.free_rows >= enough_rows):
            prefill = self._admit()
            if prefill is not None:
                return prefill
        return self._decode()

    def update(
        self, step: Prefill | Decode, tokens: IntArray, log_probs: NDArray[np.float32]
    ) -> list[Sequence]:
        """Take in the tokens sampled for a step's rows; returns the sequences that are finished."""
        stopped, full = self._running.record(step.rows, tokens, log_probs)
        finished = []
        for rows, reason in ((stopped, "stop"), (full, "length")):
            for row in rows.tolist():
                self._blocks.free(row)
            for sequence in self._running.release(rows) if len(rows) else ():
                sequence.finish_reason = reason  # type: ignore[assignment]
                finished.append(sequence)
        return finished

    def _admit(self) -> Prefill | None:
        """Prefill as many waiting sequences as tokens, rows and pages allow; None if none."""
        rows: list[int] = []
        leaders: list[int] = []
        runs: list[tuple[Sequence, int]] = []  # the sequences to run, with their rows
        copies: list[tuple[int, int]] = []
        tokens = 0
        while self._waiting and self._running.free_rows:
            sequence = self._waiting[0]
            length = sequence.prefill_length
            forked = bool(runs) and _same_tokens(runs[-1][0], sequence)
            needed = (length % PAGE_SIZE > 0) if forked else pages_for(length)
            if not self._fits(sequence, needed):
                break
            if not forked and runs and tokens + length > self._max_batched_tokens:
                break
            row = self._running.admit(self._waiting.popleft())
            if forked:
                copy = self._blocks.fork(runs[-1][1], row, length)
                copies.extend([copy] if copy else [])
            else:
                self._blocks.allocate(row, length)
                runs.append((sequence, row))
                tokens += length
            rows.append(row)
            leaders.append(len(runs) - 1)
        if not rows:
            return None
        lengths = [sequence.prefill_length for sequence, _ in runs]
        owners = np.repeat(np.array([row for _, row in runs]), lengths)
        positions = np.concatenate([np.arange(length) for length in lengths])
        return Prefill(
            rows=np.array(rows),
            token_ids=np.concatenate([sequence.prefill_ids() for sequence, _ in runs]),
            slots=self._blocks.slots(owners, positions),
            lengths=lengths,
            leaders=np.array(leaders),
            page_copies=np.array(copies, dtype=np.int64).reshape(-1, 2),
        )

    def _fits(self, sequence: Sequence, needed: int) -> bool:
        """Whether a page is left for each that will want one, so that none is evicted at once."""
        order = self._running.order
        if not len(order):
            return needed <= self._blocks.free_pages
        wanting = int((self._running.max_pages[order] > self._blocks.owned[order]).sum())
        wanting += pages_for(sequence.max_length) > pages_for(sequence.prefill_length)
        return needed + wanting <= self._blocks.free_pages

    def _decode(self) -> Decode:
        running, blocks = self._running, self._blocks
        while True:
            rows = running.order
            positions = running.cached[rows]
            wanting = rows[blocks.owned[rows] * PAGE_SIZE == positions]
            if len(wanting) <= blocks.free_pages:
                break
            self._preempt(rows[-1:])
        blocks.append(wanting)
        order = padding_order(positions + 1)
        if order is not None:
            rows, positions = rows[order], positions[order]
        running.cached[rows] += 1
        return Decode(
            rows=rows,
            token_ids=running.last_token[rows],
            slots=blocks.slots(rows, positions),
            lengths=positions + 1,
            tables=blocks.tables[rows, : pages_for(int(positions.max()) + 1)],
        )

    def _preempt(self, row: IntArray) -> None:
        assert len(self._running) > 1, "each request fits into the cache alone"
        self._blocks.free(int(row[0]))
        self._waiting.extendleft(self._running.release(row))
        self.preemptions += 1


def _same_tokens(one: Sequence, other: Sequence) -> bool:
    return one.group == other.group and not one.token_ids and not other.token_ids
