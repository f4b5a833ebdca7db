"""Sequences of operations on a DataProto beside a naive model of it: a list of row dicts."""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from caldera.errors import ProtocolError
from caldera.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from tests.unit.protocol.rows_model import (
    NAN,
    Kinds,
    Rows,
    assert_models,
    build,
    gathered,
    rows_of,
    texts,
)

DTYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64,
          torch.float16, torch.bfloat16]  # fmt: skip
SHAPES = [(), (), (0,), (1,), (3,), (4,), (2, 2), (4, 2)]
COLUMNS = [("O", ()), ("O", ()), ("O", (4,)), ("i4", ()), ("i8", (2,)), ("f8", ()), ("U3", ())]
METAS = [0.7, NAN, None, [1, 2], {"a": NAN}, "name", (1,)]
MOST_ROWS = 20

tensor_kinds = st.dictionaries(
    st.sampled_from("uvwx"), st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES))
)
column_kinds = st.dictionaries(st.sampled_from("abc"), st.sampled_from(COLUMNS))
seeds = st.integers(0, 2**32 - 1)
index_kinds = st.sampled_from(["list", "array", "tensor"])


def subsets(keys: list[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(keys), unique=True) if keys else st.just([])


def index(kind: str, values: list[Any], dtype: Any) -> Any:
    array = np.array(values, dtype=dtype)
    return {"list": values, "array": array, "tensor": torch.from_numpy(array)}[kind]


class BesideRows(RuleBasedStateMachine):
    """One DataProto, its model, and the pair before the last operation, which must not change."""

    data: DataProto
    model: Rows
    before: tuple[DataProto, Rows] | None = None

    @initialize(
        rows=st.sampled_from([4, 3, 2, 1, 5, 6, 0]),
        tensors=st.none() | tensor_kinds,
        columns=column_kinds,
        seed=seeds,
        meta=st.dictionaries(st.sampled_from("mn"), st.sampled_from(METAS)),
        metrics=st.booleans(),
    )
    def start(
        self, rows: int, tensors: Any, columns: Any, seed: int, meta: Any, metrics: bool
    ) -> None:
        rows = rows if columns or tensors is not None else 0
        meta |= {"metrics": {"loss": seed % 7}} if metrics else {}
        self.data, self.model = build(rows, tensors, columns, meta, seed)

    @invariant()
    def data_and_model_agree(self) -> None:
        assert_models(self.data, self.model)
        if self.before is not None:
            assert_models(*self.before)

    @property
    def count(self) -> int:
        return len(self.model.rows)

    def adopt(self, data: DataProto, model: Rows) -> None:
        """Go on with a result, unless it has become too large or too poor to be worth it."""
        assert_models(data, model)
        if any(self.model.rows) <= any(model.rows) and len(model.rows) <= MOST_ROWS:
            self.before = self.data, self.model
            self.data, self.model = data, model

    def in_place(self, model: Rows) -> DataProto:
        """The DataProto, which the caller is about to turn into this model."""
        self.before = self.data.select(), self.model
        self.model = model
        return self.data

    # ---- rows

    @rule(number=st.integers(-25, 25))
    def one_row(self, number: int) -> None:
        if not -self.count <= number < self.count:
            with pytest.raises(ProtocolError, match=f"no row {number} in {self.count} rows"):
                self.data[number]
            return
        item = self.data[number]
        tensors = {} if item.batch is None else dict(item.batch.items())
        assert texts([{**tensors, **item.non_tensor_batch}]) == texts([self.model.rows[number]])
        assert texts([item.meta_info]) == texts([self.model.meta])

    @rule(draw=st.data())
    def cut(self, draw: Any) -> None:
        part = draw.draw(st.slices(self.count))
        self.adopt(self.data[part], self.model.take(range(self.count)[part]))

    @rule(seed=seeds, kind=index_kinds)
    def pick(self, seed: int, kind: str) -> None:
        random = Random(seed)
        numbers = [random.randrange(-self.count, self.count) for _ in range(min(self.count, 9))]
        self.adopt(self.data[index(kind, numbers, np.int64)], self.model.take(numbers))

    @rule(seed=seeds, kind=index_kinds)
    def mask(self, seed: int, kind: str) -> None:
        flags = [Random(seed + number).random() < 0.6 for number in range(self.count)]
        numbers = [number for number, flag in enumerate(flags) if flag]
        self.adopt(self.data[index(kind, flags, bool)], self.model.take(numbers))

    @rule(times=st.integers(0, 3), interleave=st.booleans())
    def repeat(self, times: int, interleave: bool) -> None:
        numbers = [number for number in range(self.count) for _ in range(times)]
        if not interleave:
            numbers = [number for _ in range(times) for number in range(self.count)]
        self.adopt(self.data.repeat(times, interleave), self.model.take(numbers))

    @rule(seed=seeds, kind=index_kinds)
    def sample_level_repeat(self, seed: int, kind: str) -> None:
        counts = [Random(seed + number).randrange(3) for number in range(self.count)]
        numbers = [number for number, count in enumerate(counts) for _ in range(count)]
        repeated = self.data.sample_level_repeat(index(kind, counts, np.int32))
        self.adopt(repeated, self.model.take(numbers))

    @rule(seed=seeds)
    def reorder(self, seed: int) -> None:
        order = Random(seed).sample(range(self.count), self.count)
        self.in_place(self.model.take(order)).reorder(torch.tensor(order, dtype=torch.int64))

    @rule(size=st.integers(0, 3), candidate=st.sampled_from(["first", "", "last"]))
    def padding(self, size: int, candidate: str) -> None:
        if self.count == 0 and size:
            with pytest.raises(ProtocolError, match="to 0 rows"):
                self.data.padding(size, candidate)
            return
        filler = [0 if candidate == "first" else self.count - 1] * size
        self.in_place(self.model.take([*range(self.count), *filler])).padding(size, candidate)

    @rule(divisor=st.integers(1, 9))
    def pad_and_unpad(self, divisor: int) -> None:
        padded, size = pad_dataproto_to_divisor(self.data, divisor)
        target = self.count
        while target % divisor:
            target += 1
        assert size == target - self.count
        assert_models(padded, self.model.take([n % self.count for n in range(target)]))
        self.adopt(unpad_dataproto(padded, size), self.model)

    @rule(chunks=st.integers(1, 4), auto=st.booleans())
    def chunk(self, chunks: int, auto: bool) -> None:
        with patch.dict(os.environ, VERL_AUTO_PADDING=str(auto)):
            if self.count % chunks and not auto:
                with pytest.raises(ProtocolError, match=f"make {chunks} equal chunks"):
                    self.data.chunk(chunks)
                return
            parts = self.data.chunk(chunks)
        left = list(range(self.count))
        for place, part in zip(range(chunks), parts, strict=True):
            length = len([number for number in range(self.count) if number % chunks == place])
            assert_models(part, self.model.take(left[:length]))
            left = left[length:]

    @rule(size=st.integers(1, 5), backwards=st.booleans())
    def split_and_concat(self, size: int, backwards: bool) -> None:
        parts = self.data.split(size)
        groups = [list(range(self.count))[i : i + size] for i in range(0, self.count, size)]
        for part, group in zip(parts, groups, strict=True):
            assert_models(part, self.model.take(group))
        if not parts:
            return
        if backwards:
            parts, groups = parts[::-1], groups[::-1]
        joined = self.model.take([number for group in groups for number in group])
        metas = [dict(self.model.meta) for _ in parts]
        for number, part in enumerate(parts):
            if number % 3 < 2:  # and the others report what they had, or nothing
                metas[number]["metrics"] = {"loss": number, f"of{number % 2}": NAN}
            part.meta_info = metas[number]
        whole = DataProto.concat(parts)
        assert_models(whole, replace(joined, meta=gathered(metas)))
        # Gathered again and again, the metrics would grow without end.
        others = {key: value for key, value in joined.meta.items() if key != "metrics"}
        self.adopt(whole.select(meta_info_keys=[*others]), replace(joined, meta=others))

    @rule(size=st.integers(1, 4), epochs=st.integers(0, 2), seed=seeds, shuffle=st.booleans())
    def iterate(self, size: int, epochs: int, seed: int, shuffle: bool) -> None:
        options = {"shuffle": True} if shuffle else None
        if self.count % size:
            with pytest.raises(ProtocolError, match=f"mini-batches of {size}"):
                self.data.make_iterator(size, epochs, seed, options)
            return
        parts = list(self.data.make_iterator(size, epochs, seed, options))
        assert [len(part) for part in parts] == [size] * (self.count * epochs // size)
        assert all(texts([part.meta_info]) == texts([self.model.meta]) for part in parts)
        seen = [text for part in parts for text in texts(rows_of(part))]
        expected = texts(self.model.rows) * epochs
        assert sorted(seen) == sorted(expected) if shuffle else seen == expected

    # ---- keys

    @rule(draw=st.data(), deepcopy=st.booleans())
    def select(self, draw: Any, deepcopy: bool) -> None:
        keys = self.model.parts()
        wanted = [draw.draw(st.none() | subsets(part)) for part in keys]
        kept = [whole if part is None else part for part, whole in zip(wanted, keys, strict=True)]
        selected = self.data.select(wanted[0], wanted[1], wanted[2], deepcopy=deepcopy)
        self.adopt(selected, self.model.keep(*kept))

    @rule(draw=st.data())
    def pop(self, draw: Any) -> None:
        keys = self.model.parts()
        popped = [draw.draw(subsets(part)) for part in keys]
        left = [[k for k in part if k not in out] for part, out in zip(keys, popped, strict=True)]
        source = self.model if popped[0] else replace(self.model, tensors=None)
        rest = self.data.select()
        assert_models(rest.pop(*popped), source.keep(*popped))
        self.adopt(rest, self.model.keep(*left))

    @precondition(lambda self: self.model.tensors)
    @rule(seed=seeds)
    def rename(self, seed: int) -> None:
        random, keys = Random(seed), self.model.parts()[0]
        old = random.sample(keys, random.randint(1, len(keys)))
        free = old + [key for key in "uvwxyz" if key not in keys]
        names = dict(zip(old, random.sample(free, len(old)), strict=True))
        model = replace(
            self.model,
            tensors={names.get(k, k): kind for k, kind in (self.model.tensors or {}).items()},
            rows=[{names.get(k, k): value for k, value in row.items()} for row in self.model.rows],
        )
        new = [*names.values()]
        self.in_place(model).rename(*((old, new) if len(old) > 1 else (old[0], new[0])))

    @rule(draw=st.data(), seed=seeds, copied=st.booleans())
    def union(self, draw: Any, seed: int, copied: bool) -> None:
        """With some of its own keys, in the same memory or copied, and with new keys."""
        tensors, columns, meta = (draw.draw(subsets(part)) for part in self.model.parts())
        other = self.data.select(tensors, columns, meta)
        other = pickle.loads(pickle.dumps(other)) if copied else other
        model = self.model
        if model.tensors is not None:
            name = next(f"new{n}" for n in range(99) if f"new{n}" not in model.tensors)
            kinds: Kinds = {name: (torch.float32, (2,))}
            added, more = build(self.count, kinds, {}, {f"k_{name}": 1}, seed)
            other.union(added)
            model = Rows(
                [{**row, **new} for row, new in zip(model.rows, more.rows, strict=True)],
                {**model.tensors, **kinds},
                model.columns,
                {**model.meta, f"k_{name}": 1},
            )
        if copied and any("nan" in repr(row[key]) for row in model.rows for key in tensors):
            with pytest.raises(ProtocolError, match="differs"):  # as torch.equal has it
                self.data.union(other)
        else:
            assert self.in_place(model).union(other) is self.data

    @precondition(lambda self: self.model.rows and self.model.rows[0])
    @rule(seed=seeds)
    def conflicting_union(self, seed: int) -> None:
        random, other = Random(seed), copy.deepcopy(self.data)
        key = random.choice([*self.model.rows[0]])
        tensors = {} if other.batch is None else dict(other.batch.items())
        values: Any = {**tensors, **other.non_tensor_batch}[key]
        places = [*np.ndindex(tuple(values.shape))]
        if places:
            place = random.choice(places)
            old = values[place]
            other_number = not old if values.dtype == torch.bool else 77
            values[place] = "xyz" if isinstance(old, str) else other_number
            with pytest.raises(ProtocolError, match=f"'{key}'\\] differs"):
                self.data.union(other.select(*(([key], []) if key in tensors else ([], [key]))))

    @rule(draw=st.data(), n_split=st.sampled_from([1, 2, 4]))
    def unfold_column_chunks(self, draw: Any, n_split: int) -> None:
        kinds = {**(self.model.tensors or {}), **self.model.columns}
        fitting = [k for k, (_, shape) in kinds.items() if shape and shape[0] % n_split == 0]
        keys = draw.draw(subsets(fitting))

        def piece(key: str, cells: list[Any], number: int) -> list[Any]:
            size = kinds[key][1][0] // n_split
            return cells[number * size : (number + 1) * size]

        def cut(part: Kinds) -> Kinds:
            return {
                key: (kind, (shape[0] // n_split, *shape[1:]) if key in keys else shape)
                for key, (kind, shape) in part.items()
            }

        rows = [
            {key: piece(key, v, number) if key in keys else v for key, v in row.items()}
            for row in self.model.rows
            for number in range(n_split)
        ]
        tensors = None if self.model.tensors is None else cut(self.model.tensors)
        model = Rows(rows, tensors, cut(self.model.columns), self.model.meta)
        self.adopt(self.data.unfold_column_chunks(n_split, keys), model)

    # ---- other forms and back

    @rule()
    def tensordict(self) -> None:
        model = replace(self.model, columns={key: ("O", ()) for key in self.model.columns})
        if not model.tensors and (model.columns or not model.rows):
            model.tensors = None  # there is nothing of it in a TensorDict
        self.adopt(DataProto.from_tensordict(self.data.to_tensordict()), model)

    @rule(method=st.sampled_from(["torch", "numpy"]), disk=st.booleans())
    def pickled(self, method: str, disk: bool) -> None:
        with (
            patch.dict(os.environ, VERL_DATAPROTO_SERIALIZATION_METHOD=method),
            tempfile.TemporaryDirectory() as folder,
        ):
            if disk:
                self.data.save_to_disk(f"{folder}/batch")
                self.adopt(DataProto.load_from_disk(f"{folder}/batch"), self.model)
            else:
                self.adopt(pickle.loads(pickle.dumps(self.data)), self.model)


BesideRows.TestCase.settings = settings(
    max_examples=500, stateful_step_count=15, deadline=None, database=None
)
TestBesideRows = BesideRows.TestCase
