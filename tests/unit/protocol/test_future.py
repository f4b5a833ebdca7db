from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from operator import methodcaller
from typing import Any

import pytest

from caldera.errors import ProtocolError
from caldera.protocol import DataProto, DataProtoFuture

AssertSame = Callable[[DataProto, DataProto], None]


def resolve(futures: list[Any]) -> list[Any]:
    return [future.result() for future in futures]


def submit(pool: ThreadPoolExecutor, parts: list[DataProto]) -> list[Future[DataProto]]:
    return [pool.submit(methodcaller("select"), part) for part in parts]


def test_concat_and_get(data: DataProto, assert_same: AssertSame) -> None:
    with ThreadPoolExecutor(2) as pool:
        future = DataProtoFuture.concat(submit(pool, data.chunk(2)), resolve)
        assert_same(future.get(), data)


class Reference:
    """Like Ray's: no result of its own, but a future on request."""

    def __init__(self, future: Future[DataProto]) -> None:
        self.future = lambda: future


def test_futures_references_and_values_need_no_getter(
    data: DataProto, assert_same: AssertSame
) -> None:
    with ThreadPoolExecutor(1) as pool:
        first, second = submit(pool, data[:2].chunk(2))
        future = DataProtoFuture(DataProto.concat, [first, Reference(second), data[2:]])
        assert_same(future.get(), data)
        assert_same(DataProtoFuture.concat([first]).get(), data[:1])


def test_chunk_of_a_future(data: DataProto, assert_same: AssertSame) -> None:
    with ThreadPoolExecutor(2) as pool:
        halves = DataProtoFuture.concat(submit(pool, data.chunk(4)), resolve).chunk(2)
        for half, expected in zip(halves, data.chunk(2), strict=True):
            assert_same(half.get(), expected)
        assert_same(halves[1].chunk(2)[0].get(), data[2:3])


def test_nothing_is_resolved_before_get() -> None:
    def refuse(futures: list[Any]) -> list[Any]:
        raise AssertionError("resolved too early")

    chunks = DataProtoFuture.concat([object()], refuse).chunk(2)
    with pytest.raises(AssertionError, match="too early"):
        chunks[0].get()


def test_getter_sees_the_futures_in_order(data: DataProto) -> None:
    table = {"ref-0": data[:1], "ref-1": data[1:]}
    future = DataProtoFuture(
        collect_fn=DataProto.concat,
        futures=["ref-1", "ref-0"],
        dispatch_fn=methodcaller("slice", 1),
        getter=lambda references: [table[reference] for reference in references],
    )
    assert future.get().non_tensor_batch["name"].tolist() == ["c", "d", "a"]


def test_collect_must_make_a_dataproto() -> None:
    future = DataProtoFuture(collect_fn=len, futures=[1], getter=list)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="collect_fn returned a int, not a DataProto"):
        future.get()


def test_chunks_travel(data: DataProto, assert_same: AssertSame) -> None:
    chunk = DataProtoFuture.concat([data], list).chunk(2)[1]
    assert_same(pickle.loads(pickle.dumps(chunk)).get(), data[2:])
