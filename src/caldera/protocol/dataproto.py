"""DataProto, the batch that every part of the system takes and returns."""

from __future__ import annotations

import builtins
import copy
import itertools
import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeAlias, overload

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.utils.data import DataLoader

from caldera.errors import ProtocolError
from caldera.protocol import merging
from caldera.protocol.inputs import (
    Column,
    Keys,
    RowIndices,
    as_column,
    common_leading_shape,
    entries,
    key_list,
    object_column,
    repeat_counts,
    require_keys,
    row_numbers,
    subset,
    without,
)
from caldera.protocol.serialization import (
    DataProtoConfig,
    SerializedBatch,
    deserialize_batch,
    serialize_batch,
)
from caldera.storage.writing import written_aside

_State: TypeAlias = tuple[SerializedBatch | None, dict[str, Column], dict[str, Any]]


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
class _Parts:
    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __getstate__(self) -> _State:
        # Tensors may be views: pickled as they are, each would take its whole batch along.
        return serialize_batch(self.batch), self.non_tensor_batch, self.meta_info

    def __setstate__(self, state: _State) -> None:
        batch, self.non_tensor_batch, self.meta_info = state
        self.batch = deserialize_batch(batch)

    def __copy__(self) -> Self:
        batch = None if self.batch is None else self.batch.copy()
        return type(self)(batch, dict(self.non_tensor_batch), dict(self.meta_info))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        batch = None if self.batch is None else self.batch.clone()
        return type(self)(batch, *copy.deepcopy((self.non_tensor_batch, self.meta_info), memo))


class DataProtoItem(_Parts):
    """One row of a DataProto; its tensors have no batch dimension."""


@dataclass(eq=False)
class DataProto(_Parts):
    """Rows of tensors and of numpy arrays, with facts about all of them.

    `len(x)` counts the rows; `x[i]` is one row, `x[a:b]`, `x[[i, j]]` and `x[mask]` are DataProtos.
    `slice`, `chunk`, `split` and `x[a:b]` share the memory of their source. Every result has its
    own three mappings, so that adding a key to it stays local. What is done in place gives the
    DataProto new mappings: a holder of the old ones sees no change.
    """

    # ---- rows

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

    # ---- construction and conversion

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, torch.Tensor | Column],
        meta_info: Mapping[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> DataProto:
        """Tensors go to `batch`, numpy arrays to `non_tensor_batch`."""
        for key, value in data.items():
            if not isinstance(value, torch.Tensor | np.ndarray):
                raise ProtocolError(
                    f"from_single_dict: {key!r} is a {type(value).__name__}, "
                    "neither a tensor nor a numpy array"
                )
        tensors = {key: v for key, v in data.items() if isinstance(v, torch.Tensor)}
        columns = {key: v for key, v in data.items() if isinstance(v, np.ndarray)}
        return cls.from_dict(tensors, columns, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Column | Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """A DataProto of the given parts; lists become object columns.

        All tensors must agree in their first `num_batch_dims` dimensions, of which the first is
        the row. More than one is for batches without non-tensors that `unfold_batch_dim` flattens.
        """
        if num_batch_dims < 1 or (non_tensors and num_batch_dims != 1):
            raise ProtocolError(
                f"from_dict: num_batch_dims={num_batch_dims} with {len(non_tensors or {})} "
                "non-tensors; it must be at least 1, and 1 where there are non-tensors"
            )
        for key, value in (tensors or {}).items():
            if not isinstance(value, torch.Tensor):
                raise ProtocolError(f"from_dict: tensors[{key!r}] is a {type(value).__name__}")
        leading = common_leading_shape("from_dict", "tensors", tensors or {}, num_batch_dims)
        meta = dict(meta_info or {})
        if auto_padding:
            meta[DataProtoConfig.auto_padding_key] = True
        return cls(
            TensorDict(dict(tensors), batch_size=leading[:1]) if tensors and leading else None,
            {key: as_column(key, value) for key, value in (non_tensors or {}).items()},
            meta,
        )

    @classmethod
    def from_tensordict(cls, data: TensorDict) -> DataProto:
        """Stacks of non-tensors become columns, single non-tensors become meta_info."""
        tensors: dict[str, Any] = {}
        columns: dict[str, Column] = {}
        meta: dict[str, Any] = {}
        for key, value in entries(data).items():
            if isinstance(value, NonTensorStack):
                columns[key] = object_column(value.tolist())
            elif isinstance(value, NonTensorData):
                meta[key] = value.data
            else:
                tensors[key] = value
        # Without any entry a row, only the batch knows how many rows there are.
        has_batch = bool(tensors) or (not columns and any(data.batch_size))
        batch = TensorDict(tensors, data.batch_size, device=data.device) if has_batch else None
        return cls(batch, columns, meta)

    def to_tensordict(self) -> TensorDict:
        """All three parts in one TensorDict; `from_tensordict` is the inverse."""
        merged = TensorDict({}, [len(self)]) if self.batch is None else self.batch.copy()
        non_tensors: dict[str, Any] = {
            key: NonTensorStack(*map(NonTensorData, column))
            for key, column in self.non_tensor_batch.items()
        }
        meta = {key: NonTensorData(value) for key, value in self.meta_info.items()}
        for key, value in [*non_tensors.items(), *meta.items()]:
            if key in entries(merged):
                raise ProtocolError(f"to_tensordict: {key!r} occurs in more than one part")
            merged.set(key, value)
        return merged

    def to(self, device: str | int | torch.device) -> DataProto:
        """Move the batch, in place."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """The rows of all, in order. Metrics become lists; other meta_info must agree.

        One part alone is not copied.
        """
        if not data:
            raise ProtocolError("concat: there is nothing to concatenate")
        batches = [part.batch for part in data if part.batch is not None]
        if batches and len(batches) < len(data):
            lacking = [number for number, part in enumerate(data) if part.batch is None]
            raise ProtocolError(f"concat: the parts {lacking} of {len(data)} have no batch")
        return type(data[0])(
            merging.concat_tensor_dicts(batches, "concat") if batches else None,
            merging.concat_numpy_dicts([part.non_tensor_batch for part in data], "concat"),
            merging.concat_meta([part.meta_info for part in data]),
        )

    # ---- columns

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """A DataProto with some of the keys, which shares memory unless copied; None takes all."""
        self._require("select", batch_keys, non_tensor_batch_keys, meta_info_keys)
        batch = None
        if self.batch is not None:
            keys = key_list(batch_keys)
            batch = self.batch.copy() if batch_keys is None else self.batch.select(*keys)
        columns = subset(self.non_tensor_batch, non_tensor_batch_keys)
        meta = subset(self.meta_info, meta_info_keys)
        if deepcopy:
            batch = None if batch is None else batch.clone()
            columns, meta = copy.deepcopy(columns), copy.deepcopy(meta)
        return type(self)(batch, columns, meta)

    def pop(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
    ) -> DataProto:
        """Remove the keys, in place, and return them as a DataProto; None removes nothing."""
        self._require("pop", batch_keys, non_tensor_batch_keys, meta_info_keys)
        tensor_keys = key_list(batch_keys)
        popped_batch = None
        if self.batch is not None and tensor_keys:
            popped_batch = self.batch.select(*tensor_keys)
            self.batch = self.batch.exclude(*tensor_keys)
        column_keys, meta_keys = key_list(non_tensor_batch_keys), key_list(meta_info_keys)
        popped = type(self)(
            popped_batch,
            subset(self.non_tensor_batch, column_keys),
            subset(self.meta_info, meta_keys),
        )
        self.non_tensor_batch = without(self.non_tensor_batch, column_keys)
        self.meta_info = without(self.meta_info, meta_keys)
        return popped

    def rename(self, old_keys: Keys = None, new_keys: Keys = None) -> DataProto:
        """Rename tensors, in place: one key or equally many old and new ones."""
        old, new = key_list(old_keys), key_list(new_keys)
        self._require("rename", old)
        if len(old) != len(new):
            raise ProtocolError(f"rename: {len(old)} old keys {old} for {len(new)} new keys {new}")
        if self.batch is None:
            return self
        kept = self.batch.exclude(*old)
        for key, new_key in zip(old, new, strict=True):
            if new_key in entries(kept):
                raise ProtocolError(f"rename: {key!r} to {new_key!r}, which is a key of the batch")
            kept.set(new_key, self.batch.get(key))
        self.batch = kept
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the keys of another DataProto, in place; a key of both must have equal values."""
        if self._has_rows() and other._has_rows() and len(self) != len(other):
            raise ProtocolError(f"union: {len(self)} rows against {len(other)} rows")
        batches = [part.batch for part in (self, other) if part.batch is not None]
        batch = batches[0].copy() if batches else None
        if len(batches) == 2:
            batch = merging.union_tensor_dict(*batches)
        columns = merging.union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        meta = merging.union_dict(self.meta_info, other.meta_info, "union", "meta_info")
        self.batch, self.non_tensor_batch, self.meta_info = batch, columns, meta
        return self

    def unfold_column_chunks(self, n_split: int, split_keys: Keys = None) -> DataProto:
        """Make `n_split` rows of each row: listed keys are cut along dim 1, others are repeated."""
        tensors, columns = entries(self.batch), self.non_tensor_batch
        keys = key_list(split_keys)
        require_keys("unfold_column_chunks", "data", keys, {**tensors, **columns})
        if n_split < 1:
            raise ProtocolError(f"unfold_column_chunks: n_split={n_split} < 1")
        cut_tensors = {k: _cut_dim_1(k, v, n_split) for k, v in tensors.items() if k in keys}
        cut_columns = {k: _cut_dim_1(k, v, n_split) for k, v in columns.items() if k in keys}
        others = self.select([*without(tensors, keys)], [*without(columns, keys)]).repeat(n_split)
        if others.batch is not None:
            others.batch.update(cut_tensors)
        others.non_tensor_batch.update(cut_columns)
        return others

    def _has_rows(self) -> bool:
        return self.batch is not None or bool(self.non_tensor_batch)

    def _require(
        self, operation: str, batch: Keys = None, non_tensor: Keys = None, meta: Keys = None
    ) -> None:
        require_keys(operation, "batch", key_list(batch), entries(self.batch))
        require_keys(operation, "non_tensor_batch", key_list(non_tensor), self.non_tensor_batch)
        require_keys(operation, "meta_info", key_list(meta), self.meta_info)

    # ---- transport and summaries

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Pickle into a file, which appears whole or not at all."""
        with written_aside(Path(filepath)) as aside, aside.open("wb") as file:
            pickle.dump(self, file)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str]) -> DataProto:
        """Read what `save_to_disk` wrote. Unpickling runs code: only read files that you trust."""
        data = pickle.loads(Path(filepath).read_bytes())
        if not isinstance(data, DataProto):
            raise ProtocolError(f"load_from_disk: {filepath} holds a {type(data).__name__}")
        return data

    def print_size(self, prefix: str = "") -> None:
        """Write the memory of both row parts to standard output."""
        tensors = [] if self.batch is None else list(self.batch.values(True, True))
        sizes = [t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor)]
        columns = _numpy_bytes(self.non_tensor_batch)
        line = f"batch: {_human(sum(sizes))}, non_tensor_batch: {_human(columns)}"
        sys.stdout.write(f"{prefix} {line}\n" if prefix else f"{line}\n")

    def get_data_info(self) -> str:
        """Keys, shapes, dtypes and devices, one line a key."""
        return "\n".join(_info_lines(self))


def _cut_dim_1(key: str, value: Any, n_split: int) -> Any:
    """(B, n * C, ...) -> (B * n, C, ...)"""
    if value.ndim < 2 or value.shape[1] % n_split:
        raise ProtocolError(
            f"unfold_column_chunks: {key!r} of shape {tuple(value.shape)} has no dimension 1 "
            f"that divides into {n_split}"
        )
    rows, columns, *rest = value.shape
    return value.reshape(rows * n_split, columns // n_split, *rest)


def _repeat_rows(value: Any, rows: torch.Tensor, times: int, interleave: bool) -> Any:
    """(B, ...) -> (B * times, ...) in one copy; `rows` gives the same as row numbers."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value[rows]
    length, *rest = value.shape
    # An expanded copy is faster than an indexed one.
    if interleave:
        return value.unsqueeze(1).expand(length, times, *rest).reshape(length * times, *rest)
    return value.unsqueeze(0).expand(times, length, *rest).reshape(length * times, *rest)


# ---- What a person reads about a DataProto


def _info_lines(data: DataProto) -> Iterator[str]:
    yield f"DataProto with {len(data)} rows"
    yield "batch:"
    for key, tensor in entries(data.batch).items():
        kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        yield f"  {key}: {tuple(tensor.shape)} {kind} on {tensor.device}"
    yield "non_tensor_batch:"
    for key, column in data.non_tensor_batch.items():
        yield f"  {key}: {column.shape} {column.dtype}"
    yield "meta_info:"
    for key, value in data.meta_info.items():
        yield f"  {key}: {type(value).__name__}"


def _numpy_bytes(columns: Mapping[str, Column]) -> int:
    # An object array's own nbytes counts pointers; the size of its pickle is more useful.
    return sum(
        len(pickle.dumps(column)) if column.dtype == object else column.nbytes
        for column in columns.values()
    )


def _human(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
