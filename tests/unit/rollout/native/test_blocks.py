from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from caldera.rollout.native.blocks import PAGE_SIZE, BlockManager, pages_for

ROWS, PAGES = 6, 14


def test_pages_for() -> None:
    assert [pages_for(tokens) for tokens in (1, 15, 16, 17, 32, 33)] == [1, 1, 1, 2, 2, 3]


def test_slots_follow_the_page_table() -> None:
    blocks = BlockManager(pages=4, rows=2, pages_per_row=3)
    blocks.allocate(1, 20)
    assert blocks.tables[1, :2].tolist() == [0, 1]
    blocks.allocate(0, 16)
    blocks.append(np.array([1]))
    assert blocks.tables[1].tolist() == [0, 1, 3]
    slots = blocks.slots(np.array([1, 1, 1, 0]), np.array([0, 17, 35, 15]))
    assert slots.tolist() == [0, 17, 3 * 16 + 3, 2 * 16 + 15]


def test_a_fork_shares_full_pages_and_copies_the_last() -> None:
    blocks = BlockManager(pages=8, rows=3, pages_per_row=4)
    blocks.allocate(0, 40)
    assert blocks.fork(0, 1, 40) == (2, 3)
    assert blocks.tables[1, :3].tolist() == [0, 1, 3]
    assert blocks.references[:4].tolist() == [2, 2, 1, 1]
    blocks.free(0)
    assert blocks.references[:4].tolist() == [1, 1, 0, 1]
    blocks.free(1)
    assert blocks.free_pages == 8


def test_a_fork_at_the_end_of_a_page_copies_nothing() -> None:
    blocks = BlockManager(pages=8, rows=3, pages_per_row=4)
    blocks.allocate(0, 32)
    assert blocks.fork(0, 1, 32) is None
    assert blocks.free_pages == 6


def test_pages_that_are_not_there_are_not_given() -> None:
    blocks = BlockManager(pages=1, rows=2, pages_per_row=2)
    with pytest.raises(AssertionError):
        blocks.allocate(0, 17)


class Pages(RuleBasedStateMachine):
    """Any order of operations against a model that keeps each token's content by slot."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(PAGES, ROWS, PAGES)
        self.tokens: dict[int, list[int]] = {}  # what each row should hold
        self.memory: dict[int, int] = {}  # what is written at each slot
        self.written = 0

    def write(self, row: int, position: int) -> int:
        self.written += 1
        slot = int(self.blocks.slots(np.array([row]), np.array([position]))[0])
        self.memory[slot] = self.written
        return self.written

    def free_row(self) -> int | None:
        return next((row for row in range(ROWS) if row not in self.tokens), None)

    @precondition(lambda self: self.free_row() is not None)
    @rule(tokens=st.integers(1, 50))
    def allocate(self, tokens: int) -> None:
        if pages_for(tokens) <= self.blocks.free_pages:
            row = self.free_row()
            self.blocks.allocate(row, tokens)
            self.tokens[row] = [self.write(row, position) for position in range(tokens)]

    @precondition(lambda self: self.tokens and self.free_row() is not None)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(sorted(self.tokens)))
        count = len(self.tokens[source])
        if self.blocks.free_pages == 0 and count % PAGE_SIZE:
            return
        target = self.free_row()
        copy = self.blocks.fork(source, target, count)
        if copy is not None:
            for offset in range(PAGE_SIZE):
                start, end = (page * PAGE_SIZE + offset for page in copy)
                if start in self.memory:
                    self.memory[end] = self.memory[start]
        self.tokens[target] = list(self.tokens[source])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def append_token(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.tokens)))
        count = len(self.tokens[row])
        if self.blocks.owned[row] * PAGE_SIZE == count:
            if self.blocks.free_pages == 0:
                return
            self.blocks.append(np.array([row]))
        self.tokens[row].append(self.write(row, count))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.tokens)))
        self.blocks.free(row)
        del self.tokens[row]

    @invariant()
    def every_row_reads_its_own_tokens(self) -> None:
        for row, tokens in self.tokens.items():
            slots = self.blocks.slots(np.full(len(tokens), row), np.arange(len(tokens)))
            assert [self.memory[slot] for slot in slots.tolist()] == tokens

    @invariant()
    def no_page_is_lost_or_owned_twice(self) -> None:
        owners: Counter[int] = Counter()
        for row in range(ROWS):
            table = self.blocks.tables[row, : self.blocks.owned[row]].tolist()
            assert len(set(table)) == len(table) == pages_for(len(self.tokens.get(row, ())))
            owners.update(table)
        assert self.blocks.references.tolist() == [owners[page] for page in range(PAGES)]
        assert self.blocks.free_pages == PAGES - len(owners)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
