"""Which page of the key/value cache belongs to which sequence, and what is in those of none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

PAGE_SIZE = 16
"""Tokens a page."""
DIGEST_BYTES = 16

IntArray = NDArray[np.int64]
Scalar = TypeVar("Scalar", bound=np.generic)
NO_PAGES: IntArray = np.empty(0, dtype=np.int64)


def pages_for(tokens: int) -> int:
    """Pages that this many tokens fill, the last one perhaps partly."""
    return -(-tokens // PAGE_SIZE)


def widened(table: NDArray[Scalar], width: int, fill: int = 0) -> NDArray[Scalar]:
    """The table itself, or where it is too narrow a wider one that begins with it."""
    rows, old = table.shape
    if old >= width:
        return table
    wider = np.full((rows, max(width, 2 * old)), fill, dtype=table.dtype)
    wider[:, :old] = table
    return wider


class BlockManager:
    """Page tables of the running sequences, one row each, over pages counted by reference.

    Forked sequences share the full pages of their common start, which nobody writes to again. Full
    pages may be kept under their block hash: then they can be found and shared after their row has
    gone, until their memory is wanted. The least recently used go first.
    """

    def __init__(self, pages: int, rows: int, pages_per_row: int = 1) -> None:
        self.tables: IntArray = np.zeros((rows, pages_per_row), dtype=np.int64)
        self.owned: IntArray = np.zeros(rows, dtype=np.int64)  # pages in each row's table
        self.references: IntArray = np.zeros(pages, dtype=np.int64)
        self._free = list(range(pages - 1, -1, -1))  # a stack: low pages first, so they stay warm
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = (
            OrderedDict()
        )  # with a block hash, without a row; oldest first

    @property
    def pages(self) -> int:
        return len(self.references)

    @property
    def free_pages(self) -> int:
        """Pages that can be given out; some may hold what could still be found."""
        return len(self._free) + len(self._idle)

    @property
    def is_empty(self) -> bool:
        """Whether no page holds anything that anyone could ask for."""
        return len(self._free) == self.pages

    def grow(self, pages: int) -> None:
        """Have this many pages from now on."""
        old = self.pages
        self.references = np.append(self.references, np.zeros(pages - old, dtype=np.int64))
        self._free[:0] = range(pages - 1, old - 1, -1)

    def drop(self) -> None:
        """Have no pages: no row may own any."""
        assert not self.owned.any(), "a row owns pages"
        self.forget()
        self.tables[:] = 0  # what lies behind a row's own pages is read, too, and must exist
        self.references = self.references[:0]
        self._free.clear()

    def allocate(self, row: int, tokens: int, shared: IntArray = NO_PAGES) -> None:
        """Give an empty row the pages for this many tokens, the first of them shared
        with others."""
        assert self.owned[row] == 0, "the row is taken"
        count = pages_for(tokens)
        self.tables = widened(self.tables, count)
        if len(shared):
            for page in shared.tolist():
                self._idle.pop(page, None)
            self.references[shared] += 1
            self.tables[row, : len(shared)] = shared
        self.tables[row, len(shared) : count] = self._take(count - len(shared))
        self.owned[row] = count

    def append(self, rows: IntArray) -> None:
        """Give each of these rows, none of them twice, one more page."""
        if len(rows):
            self.tables = widened(self.tables, int(self.owned[rows].max()) + 1)
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
        unused = pages[self.references[pages] == 0].tolist()
        self.owned[row] = 0
        if self._hash_of:
            # the end of a sequence is of use to fewer than its start, so it is given out first
            self._idle.update((page, None) for page in reversed(unused) if page in self._hash_of)
            unused = [page for page in unused if page not in self._hash_of]
        self._free.extend(unused)

    def slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Where in the cache the token at a position of a row is kept."""
        page: IntArray = self.tables[rows, positions // PAGE_SIZE]
        return page * PAGE_SIZE + positions % PAGE_SIZE

    # ---- pages that can be found again

    def keep(self, row: int, hashes: Sequence[bytes]) -> None:
        """Let the row's first pages, which are full, be found by these block hashes."""
        for page, block_hash in zip(self.tables[row, : len(hashes)].tolist(), hashes, strict=True):
            if page not in self._hash_of and block_hash not in self._page_of:
                self._page_of[block_hash] = page
                self._hash_of[page] = block_hash

    def find(self, hashes: Iterable[bytes]) -> IntArray:
        """The pages of these block hashes, up to the first that is not there."""
        found = []
        for block_hash in hashes:
            page = self._page_of.get(block_hash)
            if page is None:
                break
            found.append(page)
        return np.array(found, dtype=np.int64)

    def forget(self) -> None:
        """Let no page be found any more."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._page_of.clear()
        self._hash_of.clear()

    def _take(self, count: int) -> IntArray:
        assert count <= self.free_pages, "the scheduler asks for pages that are there"
        if count == 0:
            return NO_PAGES
        while len(self._free) < count:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._hash_of.pop(page)]
            self._free.append(page)
        taken = np.array(self._free[-count:][::-1], dtype=np.int64)
        del self._free[-count:]
        self.references[taken] = 1
        return taken


def extend_block_hashes(hashes: list[bytes], tokens: NDArray[np.integer], pages: int) -> None:
    """Add block hashes until each of the first full pages of these tokens has one: pages with the
    same hash hold the same keys and values.

    A page depends on all tokens up to its end, so its hash contains the hash before it.
    """
    for page in range(len(hashes), pages):
        part = tokens[page * PAGE_SIZE : (page + 1) * PAGE_SIZE].astype(np.int32)
        digest = blake2b(hashes[-1] if hashes else b"", digest_size=DIGEST_BYTES)
        digest.update(part.tobytes())
        hashes.append(digest.digest())
