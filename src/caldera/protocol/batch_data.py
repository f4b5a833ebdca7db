"""BatchData: one way to cut and join whatever kind of batch a method was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from caldera.errors import ProtocolError
from caldera.protocol.dataproto import DataProto


@dataclass(frozen=True)
class BatchData:
    """A DataProto, a TensorDict or metadata that stand for a batch kept elsewhere.

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
