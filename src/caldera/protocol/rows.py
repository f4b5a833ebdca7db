"""The rows of a DataProto: indexing, repeating, padding, splitting, iterating."""

from __future__ import annotations

import builtins
import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, overload

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from caldera.errors import ProtocolError
from caldera.protocol.inputs import Column, RowIndices, entries, repeat_counts, row_numbers
from caldera.protocol.serialization import (
    DataProtoConfig,
    SerializedBatch,
    deserialize_batch,
    serialize_batch,
)

OWN_LOADER_OPTIONS = (
    "dataset",
    "batch_size",
    "batch_sampler",
    "collate_fn",
    "generator",
    "pin_memory",
)
"""What `make_iterator` decides itself, or cannot honour since the loader sees row numbers alone."""


@dataclass(eq=False)
class DataProtoItem:
    """One row of a DataProto; its tensors have no batch dimension."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __getstate__(self) -> tuple[SerializedBatch | None, dict[str, Any], dict[str, Any]]:
        # Its tensors are views: pickled as they are, each would take its whole batch along.
        return serialize_batch(self.batch), self.non_tensor_batch, self.meta_info

    def __setstate__(
        self, state: tuple[SerializedBatch | None, dict[str, Any], dict[str, Any]]
    ) -> None:
        batch, self.non_tensor_batch, self.meta_info = state
        self.batch = deserialize_batch(batch)

    def __copy__(self) -> DataProtoItem:
        batch = None if self.batch is None else self.batch.copy()
        return DataProtoItem(batch, dict(self.non_tensor_batch), dict(self.meta_info))

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProtoItem:
        batch = None if self.batch is None else self.batch.clone()
        return DataProtoItem(batch, *copy.deepcopy((self.non_tensor_batch, self.meta_info), memo))


@dataclass(eq=False)
class RowTable:
    """The three parts of a DataProto, and every operation that only picks rows.

    `slice`, `chunk`, `split` and `x[a:b]` share the memory of their source. Every result has its
    own three mappings, so that adding a key to it stays local. What is done in place gives the
    DataProto new mappings: a holder of the old ones sees no change.
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

    def _replace_rows(self, rows: torch.Tensor) -> None:
        """`_take` in place, which frees each old tensor before the next is copied."""
        columns = {key: column[rows.numpy()] for key, column in self.non_tensor_batch.items()}
        if self.batch is not None:
            old, device = entries(self.batch), self.batch.device
            # Gone until all keys are done, so that an error leaves no mixture of rows behind.
            self.batch = None
            new = {key: old.pop(key)[rows] for key in list(old)}
            self.batch = TensorDict(new, batch_size=[len(rows)], device=device)
        self.non_tensor_batch = columns

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> Self:
        """The rows of `x[start:end:step]`."""
        rows = range(len(self))[start:end:step]
        if rows.step < 0:  # tensors have no negative strides
            return self.select_idxs(rows)
        # A step past the end is as good as the length, and no tensor's stride can overflow by it.
        return self._take(builtins.slice(rows.start, rows.stop, min(rows.step, len(self) or 1)))

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
        self._replace_rows(rows)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Every row `repeat_times` times: a a b b when interleaved, else a b a b.

        Once shares the memory of the source.
        """
        if repeat_times < 0:
            raise ProtocolError(f"repeat: repeat_times={repeat_times} is negative")
        if repeat_times == 1:
            return self.slice()
        rows = torch.arange(len(self))
        rows = rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times)
        batch = None
        if self.batch is not None:
            repeated = {
                key: _repeat_rows(value, rows, repeat_times, interleave)
                for key, value in entries(self.batch).items()
            }
            batch = TensorDict(repeated, batch_size=[len(rows)], device=self.batch.device)
        columns = {key: column[rows.numpy()] for key, column in self.non_tensor_batch.items()}
        return type(self)(batch, columns, dict(self.meta_info))

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
        if padding_size:
            appended = torch.full((padding_size,), row)
            self._replace_rows(torch.cat([torch.arange(len(self)), appended]))

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

        A torch DataLoader with these keyword arguments gives the order. With
        `{"shuffle": True}` it draws a new one for each epoch, from the seed alone; without a seed,
        from torch's global generator. Mini-batches in the order of the rows share their memory.
        """
        options = dict(dataloader_kwargs or {})
        for option in OWN_LOADER_OPTIONS:
            if option in options:
                raise ProtocolError(f"make_iterator: dataloader_kwargs must not have {option!r}")
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ProtocolError(
                f"make_iterator: {len(self)} rows do not make mini-batches of {mini_batch_size}"
            )
        if not len(self) or not any(options.values()):
            return (part for _ in range(epochs) for part in self.split(mini_batch_size))
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader: DataLoader[int] = DataLoader(
            range(len(self)),  # type: ignore[arg-type]  # what a map-style dataset needs, it has
            batch_size=mini_batch_size,
            collate_fn=list,
            generator=generator,
            **options,
        )
        return (self.select_idxs(rows) for _ in range(epochs) for rows in loader)


def _repeat_rows(value: Any, rows: torch.Tensor, times: int, interleave: bool) -> Any:
    """(B, ...) -> (B * times, ...) in one copy; `rows` gives the same as row numbers."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value[rows]
    length, *rest = value.shape
    # An expanded copy is faster than an indexed one.
    if interleave:
        return value.unsqueeze(1).expand(length, times, *rest).reshape(length * times, *rest)
    return value.unsqueeze(0).expand(times, length, *rest).reshape(length * times, *rest)
