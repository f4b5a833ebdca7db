"""The rows of a DataProto: indexing, repeating, padding, splitting, iterating."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, overload

import numpy as np
import torch
from tensordict import TensorDict

from caldera.errors import ProtocolError
from caldera.protocol.inputs import Column, RowIndices, repeat_counts, row_numbers
from caldera.protocol.settings import DataProtoConfig


@dataclass(eq=False)
class DataProtoItem:
    """One row of a DataProto; its tensors have no batch dimension."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class RowTable:
    """The three parts of a DataProto, and every operation that only picks rows.

    `slice`, `chunk`, `split` and `x[a:b]` share the memory of their source. Every result has its
    own three mappings, so that adding a key to it stays local.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Column] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

    def check_consistency(self) -> None:
        """Raise unless the batch has one batch dimension and every column has its length."""
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise ProtocolError(
                "check_consistency: batch must have one batch dimension, "
                f"its batch size is {tuple(self.batch.batch_size)}"
            )
        for key, column in self.non_tensor_batch.items():
            if not isinstance(column, np.ndarray):
                raise ProtocolError(
                    f"check_consistency: non_tensor_batch[{key!r}] is a {type(column).__name__}, "
                    "not a numpy array"
                )
            if column.ndim == 0 or len(column) != len(self):
                raise ProtocolError(
                    f"check_consistency: non_tensor_batch[{key!r}] has shape {column.shape}, "
                    f"but there are {len(self)} rows"
                )

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(c) for c in self.non_tensor_batch.values() if c.ndim), 0)

    @overload
    def __getitem__(self, index: int) -> DataProtoItem: ...

    @overload
    def __getitem__(self, index: builtins.slice | RowIndices) -> Self: ...

    def __getitem__(self, index: int | builtins.slice | RowIndices) -> DataProtoItem | Self:
        if isinstance(index, int | np.integer):
            return self._item(int(index))
        if isinstance(index, builtins.slice):
            return self.slice(index.start, index.stop, index.step)
        return self.select_idxs(index)

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self._item(row) for row in range(len(self)))

    def _item(self, row: int) -> DataProtoItem:
        if not -len(self) <= row < len(self):
            raise ProtocolError(f"index: there is no row {row} in {len(self)} rows")
        return DataProtoItem(
            None if self.batch is None else self.batch[row],
            {key: column[row] for key, column in self.non_tensor_batch.items()},
            dict(self.meta_info),
        )

    def _take(self, rows: builtins.slice | torch.Tensor) -> Self:
        """The rows in that order: views for a slice, copies for row numbers on the CPU."""
        numpy_rows = rows if isinstance(rows, builtins.slice) else rows.numpy()
        return type(self)(
            None if self.batch is None else self.batch[rows],
            {key: column[numpy_rows] for key, column in self.non_tensor_batch.items()},
            dict(self.meta_info),
        )

    def _become(self, other: Self) -> None:
        self.batch, self.non_tensor_batch = other.batch, other.non_tensor_batch

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> Self:
        """The rows of `x[start:end:step]`."""
        if step is not None and step < 0:  # tensors have no negative strides
            return self.select_idxs(range(len(self))[start:end:step])
        return self._take(builtins.slice(start, end, step))

    def select_idxs(self, idxs: RowIndices) -> Self:
        """The rows with these numbers, in this order, or the rows where a boolean mask is true."""
        return self._take(row_numbers("select_idxs", idxs, len(self)))

    def reorder(self, indices: RowIndices) -> None:
        """Permute the rows, in place: row i becomes what row `indices[i]` was."""
        rows = row_numbers("reorder", indices, len(self))
        if not torch.equal(rows.sort().values, torch.arange(len(self))):
            raise ProtocolError(
                f"reorder: {len(rows)} indices are no permutation of {len(self)} rows"
            )
        self._become(self._take(rows))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Every row `repeat_times` times: a a b b when interleaved, else a b a b."""
        if repeat_times < 0:
            raise ProtocolError(f"repeat: repeat_times={repeat_times} is negative")
        rows = torch.arange(len(self))
        return self._take(
            rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times)
        )

    def sample_level_repeat(self, repeat_times: RowIndices) -> Self:
        """Row i `repeat_times[i]` times, copies next to each other."""
        counts = repeat_counts("sample_level_repeat", repeat_times, len(self))
        return self._take(torch.arange(len(self)).repeat_interleave(counts))

    def is_padding_enabled(self) -> bool:
        """Whether this DataProto, or every one of the process, may be padded automatically."""
        own = self.meta_info.get(DataProtoConfig.auto_padding_key, False)
        return bool(own) or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append copies of the first row (`"first"`) or of the last (`""`, `"last"`), in place."""
        if padding_candidate not in ("", "first", "last"):
            raise ProtocolError(
                f"padding: padding_candidate={padding_candidate!r} (known: '', 'first', 'last')"
            )
        if padding_size < 0 or (padding_size and not len(self)):
            raise ProtocolError(f"padding: cannot append {padding_size} rows to {len(self)} rows")
        row = 0 if padding_candidate == "first" else len(self) - 1
        self._become(self._take(torch.tensor([*range(len(self)), *[row] * padding_size]).long()))

    def chunk(self, chunks: int) -> list[Self]:
        """That many DataProtos of equal length; with auto padding, lengths may differ by one."""
        if chunks < 1:
            raise ProtocolError(f"chunk: cannot make {chunks} chunks")
        size, rest = divmod(len(self), chunks)
        if rest and not self.is_padding_enabled():
            raise ProtocolError(
                f"chunk: {len(self)} rows do not make {chunks} equal chunks; "
                "pad them with pad_dataproto_to_divisor, or enable auto padding"
            )
        bounds = [size * i + min(i, rest) for i in range(chunks + 1)]
        return [self.slice(*pair) for pair in itertools.pairwise(bounds)]

    def split(self, split_size: int) -> list[Self]:
        """Slices of at most `split_size` rows; the last may be smaller."""
        if split_size < 1:
            raise ProtocolError(f"split: cannot split by {split_size} rows")
        return [self.slice(i, i + split_size) for i in range(0, len(self), split_size)]

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Mini-batches of all rows, `epochs` times over.

        `dataloader_kwargs={"shuffle": True}` draws a new order for each epoch. The orders are a
        function of the seed alone (None is a fixed seed), never of the global random state.
        """
        kwargs = dict(dataloader_kwargs or {})
        shuffle = bool(kwargs.pop("shuffle", False))
        if kwargs:
            raise ProtocolError(
                f"make_iterator: unknown dataloader_kwargs {', '.join(kwargs)} (known: shuffle)"
            )
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ProtocolError(
                f"make_iterator: {len(self)} rows do not make mini-batches of {mini_batch_size}"
            )
        generator = torch.Generator()
        if seed is not None:
            generator.manual_seed(seed)
        return self._epochs(mini_batch_size, epochs, generator if shuffle else None)

    def _epochs(
        self, mini_batch_size: int, epochs: int, generator: torch.Generator | None
    ) -> Iterator[Self]:
        for _ in range(epochs):
            if generator is None:
                yield from self.split(mini_batch_size)
            else:
                order = torch.randperm(len(self), generator=generator)
                for rows in order.view(-1, mini_batch_size):
                    yield self._take(rows)
