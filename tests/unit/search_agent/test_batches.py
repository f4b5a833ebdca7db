"""Searches of many threads."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from caldera.search_agent.retriever.index import Hit, Index
from caldera.search_agent.retriever.server import BatchedSearch


class SlowIndex:
    """Finds the query itself. Its first search waits until it is told to go on."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.searched: list[list[str]] = []

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        self.searched.append(list(queries))
        assert self.go.wait(10)
        if "broken" in queries:
            raise RuntimeError("the disk is gone")
        return [[Hit({"contents": query}, float(topk))] for query in queries]


@pytest.fixture
def index() -> SlowIndex:
    return SlowIndex()


@pytest.fixture
def search(index: SlowIndex) -> Iterator[BatchedSearch]:
    made = BatchedSearch(cast(Index, index), cache_size=3)
    yield made
    index.go.set()
    made.close()


def one(search: BatchedSearch, query: str, topk: int = 1) -> Any:
    ((hit,),) = search.search([query], topk)
    return hit.document["contents"], hit.score


def test_those_that_wait_are_searched_together(index: SlowIndex, search: BatchedSearch) -> None:
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(one, search, "a")
        while not index.searched:
            pass
        others = [threads.submit(one, search, query) for query in "bcb"]
        while search._waiting.qsize() < 2 or search.cache_hits < 1:  # the second b is no question
            pass
        index.go.set()
        assert first.result() == ("a", 1.0)
        assert [other.result()[0] for other in others] == ["b", "c", "b"]
    assert index.searched[0] == ["a"]
    assert sorted(index.searched[1]) == ["b", "c"]


def test_answers_are_kept_by_query_and_number(index: SlowIndex, search: BatchedSearch) -> None:
    index.go.set()
    assert one(search, "a") == one(search, "a")
    assert index.searched == [["a"]]
    assert one(search, "a", topk=2) == ("a", 2.0)
    for query in "bcd":
        one(search, query)
    one(search, "a")  # the oldest is forgotten
    assert index.searched == [["a"], ["a"], ["b"], ["c"], ["d"], ["a"]]


def test_a_failure_is_told_and_not_kept(index: SlowIndex, search: BatchedSearch) -> None:
    index.go.set()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="disk is gone"):
            search.search(["broken"], 1)
    assert index.searched == [["broken"], ["broken"]]
    assert one(search, "a")[0] == "a"


def test_long_answers_take_the_place_of_several(index: SlowIndex, search: BatchedSearch) -> None:
    index.go.set()
    one(search, "a", topk=20)
    one(search, "b", topk=10)  # 30 passages are what three usual answers have
    one(search, "a", topk=20)
    assert search.cache_hits == 1
    one(search, "c", topk=11)  # b, the oldest, is not enough
    assert list(search._cache) == [("c", 11)]
    one(search, "d", topk=31)
    assert not search._cache


def test_an_answer_that_is_not_kept_is_held_by_nothing(index: SlowIndex) -> None:
    index.go.set()
    search = BatchedSearch(cast(Index, index), cache_size=0)
    ((hit,),) = search.search(["a"], 1)
    held = weakref.ref(hit)
    del hit
    deadline = time.monotonic() + 10
    while held() is not None and time.monotonic() < deadline:
        time.sleep(0.01)  # the thread that searched has to come to its next question
    is_held = held() is not None
    search.close()
    assert not is_held
