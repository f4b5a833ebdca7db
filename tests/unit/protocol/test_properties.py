"""The laws of DataProto, on drawn batches."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from random import Random
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caldera.protocol import (
    DataProto,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)

AssertSame = Callable[[DataProto, DataProto], None]
DTYPES = [torch.int64, torch.float32, torch.bfloat16, torch.bool]
LISTS = st.lists(st.integers(), max_size=2)
VALUES = st.one_of(st.none(), st.integers(), st.text(max_size=3), LISTS)

law = settings(max_examples=30, deadline=None, database=None)


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 0) -> DataProto:
    rows = draw(st.integers(min_rows, 8))
    parts = draw(st.sampled_from(["tensors", "columns", "both"]))
    tensors = {}
    if parts != "columns":
        for key in draw(st.sets(st.sampled_from("uvw"), min_size=1)):
            shape = (rows, *draw(st.lists(st.integers(0, 3), max_size=2)))
            numbers = torch.arange(int(np.prod(shape))).reshape(shape) % 5
            tensors[key] = numbers.to(draw(st.sampled_from(DTYPES)))
    columns: dict[str, np.ndarray] = {}
    if parts != "tensors":
        columns["row"] = np.arange(rows, dtype=np.int32)
        columns["value"] = np.empty(rows, dtype=object)
        for row in range(rows):
            columns["value"][row] = draw(VALUES)
    meta = draw(st.dictionaries(st.sampled_from("mn"), VALUES))
    return DataProto.from_dict(tensors, columns, meta)


@law
@given(data=batches(), chunks=st.integers(1, 4))
def test_concat_undoes_chunk_and_split(
    data: DataProto, chunks: int, assert_same: AssertSame
) -> None:
    data.meta_info["_verl_auto_padding"] = True
    parts = data.chunk(chunks)
    assert len(parts) == chunks
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert_same(DataProto.concat(parts), data)
    if len(data):
        assert_same(DataProto.concat(data.split(chunks)), data)


@law
@given(data=batches(), times=st.integers(0, 3))
def test_repeat_is_a_selection(data: DataProto, times: int, assert_same: AssertSame) -> None:
    rows = range(len(data))
    assert_same(data.repeat(times), data.select_idxs([row for row in rows for _ in range(times)]))
    assert_same(data.repeat(times, interleave=False), data.select_idxs([*rows] * times))
    assert_same(data.sample_level_repeat([times] * len(data)), data.repeat(times))


@law
@given(data=batches(min_rows=1), divisor=st.integers(1, 20))
def test_unpad_undoes_pad(data: DataProto, divisor: int, assert_same: AssertSame) -> None:
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0 and pad_size < divisor
    assert_same(unpad_dataproto(padded, pad_size), data)
    for row in range(len(padded)):
        assert_same(padded[row : row + 1], data[[row % len(data)]])


@law
@given(data=batches(min_rows=1), size=st.integers(0, 5), candidate=st.sampled_from(["first", ""]))
def test_unpad_undoes_padding(
    data: DataProto, size: int, candidate: str, assert_same: AssertSame
) -> None:
    padded = data.select()
    padded.padding(size, candidate)
    assert_same(unpad_dataproto(padded, size), data)
    row = data[:1] if candidate == "first" else data[-1:]
    assert_same(padded[len(data) :], row.repeat(size))


@law
@given(data=batches(), random=st.randoms(use_true_random=False))
def test_reorder_by_the_inverse(data: DataProto, random: Random, assert_same: AssertSame) -> None:
    order = list(range(len(data)))
    random.shuffle(order)
    moved = data.select()
    moved.reorder(order)
    assert_same(moved, data.select_idxs(order))
    moved.reorder(np.argsort(order))
    assert_same(moved, data)


@law
@given(data=batches(), flags=st.lists(st.booleans(), min_size=8, max_size=8))
def test_mask_is_the_selection_of_its_true_rows(
    data: DataProto, flags: list[bool], assert_same: AssertSame
) -> None:
    mask = np.array(flags[: len(data)], dtype=bool)
    expected = data.select_idxs(np.flatnonzero(mask))
    assert_same(data[mask], expected)
    assert_same(data[torch.from_numpy(mask)], expected)


@law
@given(data=batches(), rows=st.slices(8))
def test_slices_are_those_of_lists(data: DataProto, rows: slice, assert_same: AssertSame) -> None:
    assert_same(data[rows], data.select_idxs([*range(len(data))][rows]))


@law
@given(data=batches())
def test_union_laws(data: DataProto, assert_same: AssertSame) -> None:
    assert_same(data.select().union(data), data)
    assert_same(data.select().union(data.select(deepcopy=True)), data)
    assert_same(DataProto().union(data), data)
    assert_same(data.select().union(DataProto()), data)
    rest = data.select()
    popped = rest.pop(
        [*(data.batch.keys() if data.batch is not None else ())][:1],
        [*data.non_tensor_batch][:1],
        [*data.meta_info][:1],
    )
    left, right = popped.select().union(rest), rest.select().union(popped)
    assert_same(left, right)
    assert_same(left, data)


@law
@given(data=batches(), method=st.sampled_from(["torch", "numpy"]))
def test_pickle_round_trip(data: DataProto, method: str, assert_same: AssertSame) -> None:
    with patch.dict(os.environ, VERL_DATAPROTO_SERIALIZATION_METHOD=method):
        assert_same(pickle.loads(pickle.dumps(data)), data)


@law
@given(data=batches(min_rows=1))
def test_collate_undoes_indexing(data: DataProto, assert_same: AssertSame) -> None:
    expected = data.select()
    expected.non_tensor_batch = {
        key: column.astype(object) for key, column in expected.non_tensor_batch.items()
    }
    assert_same(collate_fn(list(data)), expected)


@law
@given(data=batches(), groups=st.integers(1, 3))
def test_unfold_undoes_fold(data: DataProto, groups: int, assert_same: AssertSame) -> None:
    data = data.repeat(groups)
    assert_same(unfold_batch_dim(fold_batch_dim(data, groups), 2), data)


@law
@given(data=batches(min_rows=1), seed=st.integers(0, 2**32), epochs=st.integers(0, 2))
def test_every_epoch_has_every_row_once(data: DataProto, seed: int, epochs: int) -> None:
    data.non_tensor_batch["row"] = np.arange(len(data))
    seen = [
        int(row)
        for part in data.make_iterator(1, epochs, seed, {"shuffle": True})
        for row in part.non_tensor_batch["row"]
    ]
    assert sorted(seen) == sorted([*range(len(data))] * epochs)
