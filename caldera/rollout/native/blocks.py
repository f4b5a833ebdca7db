"""Which page of the key/value cache belongs to which sequence."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PAGE_SIZE = 16
"""Tokens a page."""

IntArray = NDArray[np.int64]


def pages_for(tokens: int) -> int:
    """Pages that this many tokens fill, the last one perhaps partly."""
    return -(-tokens // PAGE_SIZE)


class BlockManager:
    """Page tables of the running sequences, one row each, over pages counted by reference.

    Forked sequences share the full pages of their common start, which nobody writes to again.
    """

    def __init__(self, pages: int, rows: int, pages_per_row: int) -> None:
        self.tables: IntArray = np.zeros((rows, pages_per_row), dtype=np.int64)
        self.owned: IntArray = np.zeros(rows, dtype=np.int64)  # pages in each row's table
        self.references: IntArray = np.zeros(pages, dtype=np.int64)
        self._free = list(range(pages - 1, -1, -1))  # a stack: low pages first, so they stay warm

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def allocate(self, row: int, tokens: int) -> None:
        """Give an empty row the pages for this many tokens."""
        assert self.owned[row] == 0, "the row is taken"
        count = pages_for(tokens)
        self.tables[row, :count] = self._take(count)
        self.owned[row] = count

    def append(self, rows: IntArray) -> None:
        """Give each of these rows, none of them twice, one more page."""
        self.tables[rows, self.owned[rows]] = self._take(len(rows))
        self.owned[rows] += 1

    def fork(self, source: int, target: int, tokens: int) -> tuple[int, int] | None:
        """Let an empty row start with the first tokens of another.

        A partly filled page at their end is not shared: returns (its page, the page that must
        become its copy), or None when the tokens end with a page.
        """
        assert self.owned[target] == 0, "the row is taken"
        full, rest = divmod(tokens, PAGE_SIZE)
        shared = self.tables[source, :full]
        self.references[shared] += 1
        self.tables[target, :full] = shared
        self.owned[target] = full
        if not rest:
            return None
        self.append(np.array([target]))
        return int(self.tables[source, full]), int(self.tables[target, full])

    def free(self, row: int) -> None:
        """Take the row's pages away; those that no other row shares can be given out again."""
        pages = self.tables[row, : self.owned[row]]
        self.references[pages] -= 1
        self._free.extend(pages[self.references[pages] == 0].tolist())
        self.owned[row] = 0

    def slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Where in the cache the token at a position of a row is kept."""
        page: IntArray = self.tables[rows, positions // PAGE_SIZE]
        return page * PAGE_SIZE + positions % PAGE_SIZE

    def _take(self, count: int) -> IntArray:
        assert count <= len(self._free), "the scheduler asks for pages that are there"
        if count == 0:
            return np.empty(0, dtype=np.int64)
        taken = np.array(self._free[-count:][::-1], dtype=np.int64)
        del self._free[-count:]
        self.references[taken] = 1
        return taken
