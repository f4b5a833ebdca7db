"""Samplers from a file: their order, their state, and what is wrong with some of them."""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caldera.config import DataConfig
from caldera.data import StatefulLoader, create_sampler, create_train_loader, load_object
from caldera.errors import CheckpointError, ConfigError, DataError
from caldera.protocol import DataProto

MakeConfig = Callable[..., DataConfig]

SAMPLERS = '''
import random
from caldera.data import AbstractCurriculumSampler, AbstractSampler

class Backwards(AbstractSampler):
    def __iter__(self):
        return iter(range(len(self) - 1, -1, -1))
    def __len__(self):
        return len(self.data_source)

class Reshuffled(Backwards):
    """Without a state; every epoch has an order of its own, chosen when it is asked for."""
    def __init__(self, data_source, data_config):
        super().__init__(data_source, data_config)
        self.random = random.Random(data_config.seed)
    def __iter__(self):
        order = list(range(len(self)))
        self.random.shuffle(order)
        return iter(order)

class Counting(Backwards):
    """With a state, and an end to its epochs."""
    epoch = position = 0
    def __iter__(self):
        while self.position < len(self):
            self.position += 1
            yield (self.position - 1 + self.epoch) % len(self)
        self.epoch, self.position = self.epoch + 1, 0
    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}
    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]

class Forgetful(AbstractCurriculumSampler):
    """The next row is a function of all updates so far. Draws without end."""
    known = 0
    def __iter__(self):
        while True:
            self.known = (self.known * 31 + 7) % 10007
            yield self.known % len(self.data_source)
    def __len__(self):
        return len(self.data_source)
    def update(self, batch):
        self.known += int(sum(batch.non_tensor_batch["dataset_row"])) + 1

class Learning(Forgetful):
    def state_dict(self):
        return {"known": self.known}
    def load_state_dict(self, state):
        self.known = state["known"]

class OnlySaves(Backwards):
    def state_dict(self):
        return {}

class WithoutLength(AbstractSampler):
    def __iter__(self):
        return iter([0])

class Empty(Backwards):
    def __iter__(self):
        return iter([])

class Short(Backwards):
    def __iter__(self):
        return iter(range(len(self) - 1))

class Small(Backwards):
    def __len__(self):
        return 3

class Gives(Backwards):
    def __iter__(self):
        return iter([GIVEN] * len(self))

class Keeps(Counting):
    def state_dict(self):
        return {"kept": [KEPT]}

class NoSampler:
    def __iter__(self):
        return iter([0])
    def __len__(self):
        return 1

def function():
    pass
'''


class Numbers:
    """The row i holds i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, item: int, /) -> dict[str, Any]:
        return {"tensor": torch.tensor([item]), "number": item}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samplers") / "samplers.py"
    path.write_text(SAMPLERS)
    return path


@pytest.fixture
def make_loader(source: Path, make_config: MakeConfig) -> Callable[..., StatefulLoader]:
    def make(name: str, rows: int = 10, batch_size: int = 4, **values: Any) -> StatefulLoader:
        config = make_config(train_batch_size=batch_size, **values)
        config.sampler.class_path, config.sampler.class_name = str(source), name
        return create_train_loader(Numbers(rows), config)

    return make


MakeLoader = Callable[..., StatefulLoader]


def numbers(batch: Any) -> list[int]:
    assert batch["tensor"][:, 0].tolist() == list(batch["number"]) == list(batch["dataset_row"])
    return list(batch["number"])


def finished(batch: Any) -> DataProto:
    return DataProto.from_single_dict(dict(batch))


def train(loader: StatefulLoader) -> Iterator[list[int]]:
    """What a trainer takes and tells, epoch after epoch."""
    while True:
        for batch in loader:
            loader.on_batch_end(finished(batch))
            yield numbers(batch)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


def test_the_sampler_chooses_the_rows(make_loader: MakeLoader) -> None:
    loader = make_loader("Backwards")
    assert len(loader) == 2
    for _ in range(2):  # the rows 1 and 0 fill no batch
        assert [numbers(batch) for batch in loader] == [[9, 8, 7, 6], [5, 4, 3, 2]]


def test_a_plain_loader_has_no_sampler_and_no_row_numbers(make_config: MakeConfig) -> None:
    loader = create_train_loader(Numbers(4), make_config(train_batch_size=4))
    (batch,) = loader
    loader.on_batch_end(finished(batch))  # nobody to tell
    assert loader.sampler is None
    assert set(batch) == {"tensor", "number"}


def test_the_last_batch_may_be_smaller(source: Path, make_config: MakeConfig) -> None:
    config = make_config()
    config.sampler.class_path, config.sampler.class_name = str(source), "Counting"
    rows = Numbers(5)
    loader = StatefulLoader(rows, 2, seed=0, drop_last=False, sampler=create_sampler(rows, config))
    assert len(loader) == 3
    assert [numbers(batch) for batch in loader] == [[0, 1], [2, 3], [4]]
    assert [numbers(batch) for batch in loader] == [[1, 2], [3, 4], [0]]


def test_the_next_rows_are_asked_for_after_the_update(make_loader: MakeLoader) -> None:
    # A draw makes 31 known + 7 of known, and gives its last digit; the update adds the rows and 1.
    loader = make_loader("Learning", batch_size=2)
    batches = iter(loader)
    first = next(batches)
    assert numbers(first) == [7, 4]  # 7, 224
    loader.on_batch_end(finished(first))  # 224 + 7 + 4 + 1 = 236
    assert numbers(next(batches)) == [3, 6]  # 7323, 227020 - 22 * 10007 = 6866

    untold = itertools.islice(make_loader("Learning", batch_size=2), 2)
    assert [numbers(batch) for batch in untold] == [
        [7, 4],
        [1, 1],
    ]  # 6951, 215488 - 21 * 10007 = 5341


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(["Backwards", "Reshuffled", "Counting", "Learning"]),
    rows=st.integers(1, 11),
    batch_size=st.integers(1, 4),
    kills=st.lists(st.integers(0, 9), max_size=4),
)
def test_killed_anywhere_and_resumed_nothing_changes(
    source: Path, name: str, rows: int, batch_size: int, kills: list[int]
) -> None:
    def make() -> StatefulLoader:
        config = DataConfig(seed=7, train_batch_size=min(rows, batch_size))
        config.sampler.class_path, config.sampler.class_name = str(source), name
        return create_train_loader(Numbers(rows), config)

    total = sum(kills) + 2 * len(make())
    expected = list(itertools.islice(train(make()), total))
    seen: list[list[int]] = []
    state = make().state_dict()
    for count in [*kills, total - sum(kills)]:
        loader = make()
        loader.load_state_dict(through_a_file(state))
        for batch in itertools.islice(train(loader), count):
            seen.append(batch)
            state = loader.state_dict()
    assert seen == expected


@pytest.mark.parametrize("name", ["Reshuffled", "Counting", "Learning"])
def test_a_loop_left_early_goes_on_where_it_stopped(make_loader: MakeLoader, name: str) -> None:
    expected = list(itertools.islice(train(make_loader(name, batch_size=2)), 12))
    assert len({tuple(batch) for batch in expected}) > 6
    loader = make_loader(name, batch_size=2)
    seen: list[list[int]] = []
    for _ in range(4):
        seen += itertools.islice(train(loader), 3)
    assert seen == expected


def test_the_state_of_the_sampler_is_in_that_of_the_loader(make_loader: MakeLoader) -> None:
    loader = make_loader("Counting")
    next(iter(loader))
    state = loader.state_dict()
    assert (state["epoch"], state["batches_done"]) == (0, 1)
    assert state["sampler"] == "Counting with 10 rows an epoch"
    assert state["sampler_state"] == {"epoch": 0, "position": 4}
    assert "sampler_state" not in make_loader("Backwards").state_dict()


def test_states_from_before_there_were_samplers_can_be_loaded() -> None:
    loader = StatefulLoader(Numbers(8), 2, seed=0)
    next(iter(loader))
    old = {key: value for key, value in loader.state_dict().items() if key != "sampler"}
    resumed = StatefulLoader(Numbers(8), 2, seed=0)
    resumed.load_state_dict(old)
    assert resumed.batches_done == 1


def test_a_state_of_another_sampler_is_refused(make_loader: MakeLoader) -> None:
    state = make_loader("Counting").state_dict()
    with pytest.raises(
        CheckpointError, match=r"data.sampler was Counting with 10 rows .* is Backwards with 10"
    ):
        make_loader("Backwards").load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"data.sampler was Counting .* and is None now"):
        StatefulLoader(Numbers(10), 4, seed=7).load_state_dict(state)
    del state["sampler_state"]
    with pytest.raises(CheckpointError, match=r"Counting had no state .* and has one now"):
        make_loader("Counting").load_state_dict(state)
    stateless = make_loader("Backwards").state_dict() | {"sampler_state": {}}
    with pytest.raises(CheckpointError, match=r"Backwards had a state .* and has none now"):
        make_loader("Backwards").load_state_dict(stateless)


@pytest.mark.parametrize("kept", [np.float32(1), np.zeros(2), {1}, Path("x")])
def test_a_state_that_no_checkpoint_can_hold(
    make_loader: MakeLoader, source: Path, monkeypatch: pytest.MonkeyPatch, kept: Any
) -> None:
    globals_of_source = load_object(str(source), "function", "data.sampler").__globals__
    monkeypatch.setitem(globals_of_source, "KEPT", kept)
    with pytest.raises(
        CheckpointError, match=r"Keeps.state_dict\(\)\['kept'\]\[0\] is a .*; takes numbers"
    ):
        make_loader("Keeps")
    monkeypatch.setitem(globals_of_source, "KEPT", (1, 2.0, "x", None, True, torch.ones(1)))
    make_loader("Keeps")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NoSampler", r"data.sampler: 'NoSampler' of .*samplers.py is not a subclass"),
        ("function", r"data.sampler: 'function' of .* is not a subclass of caldera.data.Abstract"),
        ("WithoutLength", r"data.sampler: 'WithoutLength' of .* does not define __len__"),
        ("OnlySaves", r"defines state_dict alone; it takes both or neither"),
        ("Backward", r"data.sampler: .* has no 'Backward' \(did you mean 'Backwards'\?\)"),
        (None, r"data.sampler: .* is given without a name; it defines Backwards"),
    ],
)
def test_what_is_no_sampler(make_loader: MakeLoader, name: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_loader(name)


def test_a_curriculum_without_a_state_is_warned_of(
    make_loader: MakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make_loader("Learning")
        make_loader("Reshuffled")
    assert caplog.messages == []
    loader = make_loader("Forgetful")
    assert caplog.messages == [
        "Forgetful has no state_dict: a resumed run will not know what it has learnt"
    ]
    next(iter(loader))
    resumed = make_loader("Forgetful")
    resumed.load_state_dict(loader.state_dict())  # the rows are skipped all the same
    assert numbers(next(iter(resumed))) == numbers(next(iter(loader)))


def test_too_few_rows(make_loader: MakeLoader) -> None:
    with pytest.raises(DataError, match=r"Small draws 3 rows an epoch, .* data.train_batch_size=4"):
        make_loader("Small")
    for name in ("Short", "Empty"):
        with pytest.raises(DataError, match=rf"{name} ended before the 8 rows"):
            list(make_loader(name, rows=8))


@pytest.mark.parametrize("given", [-1, 10, 1.0, "1", None])
def test_what_is_no_row(
    make_loader: MakeLoader, source: Path, monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    globals_of_source = load_object(str(source), "function", "data.sampler").__globals__
    monkeypatch.setitem(globals_of_source, "GIVEN", given)
    with pytest.raises(DataError, match=rf"Gives gave {given!r}; takes .* from 0 to 9"):
        next(iter(make_loader("Gives")))
    monkeypatch.setitem(globals_of_source, "GIVEN", np.int64(9))
    assert numbers(next(iter(make_loader("Gives")))) == [9] * 4
