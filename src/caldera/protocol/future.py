"""DataProtoFuture: a DataProto that other processes are still computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from tensordict import TensorDict

from caldera.errors import ProtocolError
from caldera.protocol.dataproto import DataProto

Getter: TypeAlias = Callable[[list[Any]], list[Any]]
"""Waits for the futures of a list and returns their values in order, as `ray.get` does."""


def wait_for_all(futures: list[Any]) -> list[Any]:
    """The values of futures of `concurrent.futures`, of Ray's references and of plain values."""
    # A Ray reference gives its `concurrent.futures.Future`, so Ray need not be imported here.
    waiting = [future.future() if hasattr(future, "future") else future for future in futures]
    return [future.result() if hasattr(future, "result") else future for future in waiting]


@dataclass(frozen=True)
class DataProtoFuture:
    """The parts of a DataProto as futures, so that a driver can pass results on without fetching.

    `collect_fn` makes one DataProto of the futures' values, and `dispatch_fn`, where there is one,
    takes the piece that this future stands for. `getter` resolves the futures. All three must be
    picklable when the future is sent to another process.
    """

    collect_fn: Callable[[list[Any]], DataProto]
    futures: list[Any]
    dispatch_fn: Callable[[DataProto], DataProto] | None = None
    getter: Getter = field(default=wait_for_all, kw_only=True)

    @staticmethod
    def concat(futures: Sequence[Any], getter: Getter = wait_for_all) -> DataProtoFuture:
        """A future of the rows of all futures, in order; each resolves to a DataProto."""
        return DataProtoFuture(DataProto.concat, list(futures), getter=getter)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Futures of the chunks that `DataProto.chunk` would give; nothing is resolved."""
        return [self.then(partial(_chunk_of, chunks, index)) for index in range(chunks)]

    def then(self, function: Callable[[DataProto], DataProto]) -> DataProtoFuture:
        """The future of what the function makes of it."""
        return replace(self, dispatch_fn=partial(_in_turn, self.dispatch_fn, function))

    def get(self) -> DataProto:
        """Wait for the futures and return the DataProto that they make."""
        data = self.collect_fn(self.getter(self.futures))
        if not isinstance(data, DataProto):
            raise ProtocolError(
                f"DataProtoFuture.get: collect_fn returned a {type(data).__name__}, not a DataProto"
            )
        return data if self.dispatch_fn is None else self.dispatch_fn(data)


def _chunk_of(chunks: int, index: int, data: DataProto) -> DataProto:
    return data.chunk(chunks)[index]


def _in_turn(
    first: Callable[[DataProto], DataProto] | None,
    second: Callable[[DataProto], DataProto],
    data: DataProto,
) -> DataProto:
    return second(data if first is None else first(data))


# ---- BatchData: one way to cut and join whatever kind of batch a method was given


@dataclass(frozen=True)
class BatchData:
    """A DataProto, a TensorDict or metadata that stand for a remote batch.

    A TensorDict is treated as the DataProto that `from_tensordict` makes of it: stacks of
    non-tensors are cut with the rows, single ones are meta information. Metadata may be of any
    class with a `len`, a method `chunk(n)` and a static or class method `concat(parts)`.
    """

    data: Any

    def __post_init__(self) -> None:
        if isinstance(self.data, DataProto | TensorDict):
            return
        missing = [m for m in ("__len__", "chunk", "concat") if not hasattr(self.data, m)]
        if missing:
            raise ProtocolError(
                f"BatchData: a {type(self.data).__name__} is no DataProto or TensorDict, "
                f"and has no {', '.join(missing)}"
            )

    def __len__(self) -> int:
        return len(self.data)

    def chunk(self, chunks: int) -> list[Any]:
        """That many parts, of the kind of `data`, by the rules of `DataProto.chunk`."""
        if isinstance(self.data, TensorDict):
            parts = DataProto.from_tensordict(self.data).chunk(chunks)
            return [part.to_tensordict() for part in parts]
        return list(self.data.chunk(chunks))

    @staticmethod
    def concat(parts: Sequence[Any]) -> Any:
        """The rows of all parts, by the rules of `DataProto.concat`; the parts are of one kind."""
        data = [part.data if isinstance(part, BatchData) else part for part in parts]
        if not data:
            raise ProtocolError("BatchData.concat: there is nothing to concatenate")
        kinds = sorted({type(part).__name__ for part in data})
        if len(kinds) > 1:
            raise ProtocolError(f"BatchData.concat: the parts are of the kinds {', '.join(kinds)}")
        first = BatchData(data[0]).data
        if isinstance(first, TensorDict):
            return DataProto.concat([*map(DataProto.from_tensordict, data)]).to_tensordict()
        return type(first).concat(data)
