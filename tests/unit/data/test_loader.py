from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from caldera.config import DataConfig
from caldera.data import FixedLoader, StatefulLoader, create_train_loader, create_val_loader
from caldera.data.loader import seeded_permutation
from caldera.errors import CheckpointError, DataError

MakeConfig = Callable[..., DataConfig]

PINNED_42_0 = [4, 8, 1, 9, 3, 6, 0, 7, 2, 5]


class Numbers(Dataset[dict[str, Any]]):
    """The row i holds i; row `bad` cannot be used."""

    def __init__(self, count: int, bad: int = -1) -> None:
        self.count = count
        self.bad = bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, item: int) -> dict[str, Any]:
        if item == self.bad:
            raise DataError(f"row {item} is bad")
        return {"tensor": torch.tensor([item]), "number": item}


def numbers(batch: Any) -> list[int]:
    assert batch["tensor"][:, 0].tolist() == list(batch["number"])
    return list(batch["number"])


def stream(loader: StatefulLoader) -> Iterator[list[int]]:
    """Batches, epoch after epoch, as a trainer takes them."""
    while True:
        yield from map(numbers, loader)


def test_an_epoch_is_every_row_once_in_an_order_of_its_own() -> None:
    loader = StatefulLoader(Numbers(12), 4, seed=0)
    epochs = [[numbers(batch) for batch in loader] for _ in range(3)]
    for epoch in epochs:
        assert len(epoch) == len(loader) == 3
        assert sorted(itertools.chain(*epoch)) == list(range(12))
    assert epochs[0] != epochs[1] != epochs[2]
    again = StatefulLoader(Numbers(12), 4, seed=0)
    assert [numbers(batch) for batch in again] == epochs[0]
    other = StatefulLoader(Numbers(12), 4, seed=1)
    assert [numbers(batch) for batch in other] != epochs[0]


def test_the_order_is_the_same_on_every_machine() -> None:
    # Pinned: a changed order would make checkpoints of running experiments resume elsewhere.
    assert seeded_permutation(10, 42, 0) == PINNED_42_0
    assert seeded_permutation(10, 42, 1) != PINNED_42_0
    assert sorted(seeded_permutation(5, -1)) == [0, 1, 2, 3, 4]


def test_rows_that_fill_no_batch() -> None:
    dropping = StatefulLoader(Numbers(5), 2, seed=0, shuffle=False)
    assert [numbers(batch) for batch in dropping] == [[0, 1], [2, 3]]
    keeping = StatefulLoader(Numbers(5), 2, seed=0, shuffle=False, drop_last=False)
    assert len(keeping) == 3
    assert [numbers(batch) for batch in keeping] == [[0, 1], [2, 3], [4]]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 13),
    batch_size=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    kills=st.lists(st.integers(0, 9), max_size=4),
)
def test_killed_anywhere_and_resumed_nothing_is_lost_or_repeated(
    rows: int, batch_size: int, shuffle: bool, drop_last: bool, kills: list[int]
) -> None:
    batch_size = min(batch_size, rows)

    def make() -> StatefulLoader:
        return StatefulLoader(
            Numbers(rows), batch_size, seed=3, shuffle=shuffle, drop_last=drop_last
        )

    total = sum(kills) + 2 * len(make())
    expected = list(itertools.islice(stream(make()), total))
    consumed: list[list[int]] = []
    state = make().state_dict()
    for count in [*kills, total - sum(kills)]:
        loader = make()
        loader.load_state_dict(state)
        for batch in itertools.islice(stream(loader), count):
            consumed.append(batch)
            state = loader.state_dict()  # saved while the batch is in use
    assert consumed == expected


@pytest.mark.parametrize("taken", [1, 3, 4, 6])
def test_batches_prepared_by_workers_do_not_count_as_consumed(taken: int) -> None:
    def make() -> StatefulLoader:
        return StatefulLoader(Numbers(12), 3, seed=5, num_workers=2)

    plain = StatefulLoader(Numbers(12), 3, seed=5)
    expected = list(itertools.islice(stream(plain), 8))
    first = make()
    batches = stream(first)
    before = list(itertools.islice(batches, taken))
    state = first.state_dict()
    batches.close()  # type: ignore[attr-defined]
    second = make()
    second.load_state_dict(state)
    assert before + list(itertools.islice(stream(second), 8 - taken)) == expected


def test_the_last_batch_of_an_epoch_makes_the_next_epoch_current() -> None:
    loader = StatefulLoader(Numbers(4), 2, seed=0)
    states = [(loader.epoch, loader.batches_done) for _ in loader]
    assert states == [(0, 1), (1, 0)]
    resumed = StatefulLoader(Numbers(4), 2, seed=0)
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == 2


def test_a_loop_left_early_goes_on_where_it_stopped() -> None:
    loader = StatefulLoader(Numbers(6), 2, seed=0, shuffle=False)
    for batch in loader:
        assert numbers(batch) == [0, 1]
        break
    assert [numbers(batch) for batch in loader] == [[2, 3], [4, 5]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_global_random_state_is_left_alone(num_workers: int) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(StatefulLoader(Numbers(4), 2, seed=0, num_workers=num_workers))
    list(FixedLoader(Numbers(4), 2, seed=0, shuffle=True, num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (StatefulLoader(Numbers(8), 4, seed=0), "data.train_batch_size was 2 .* is 4 now"),
        (StatefulLoader(Numbers(8), 2, seed=1), "data.seed was 0 .* is 1 now"),
        (StatefulLoader(Numbers(8), 2, seed=0, shuffle=False), "data.shuffle was True .* False"),
    ],
)
def test_a_state_of_another_loader_is_refused(other: StatefulLoader, said: str) -> None:
    state = StatefulLoader(Numbers(8), 2, seed=0).state_dict()
    with pytest.raises(CheckpointError, match=said):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("done", "rows", "then"),
    [
        (1, 12, [[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]),  # rows that were added are taken, too
        (1, 6, [[2, 3], [4, 5]]),
        (3, 6, [[0, 1], [2, 3], [4, 5]]),  # that epoch is over: the next one
        (4, 6, [[0, 1], [2, 3], [4, 5]]),  # saved at the end of an epoch
    ],
)
def test_another_number_of_rows_goes_on_at_the_same_batch(
    done: int, rows: int, then: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    saved = StatefulLoader(Numbers(8), 2, seed=0, shuffle=False)
    batches = iter(saved)
    for _ in range(done):
        next(batches)
    loader = StatefulLoader(Numbers(rows), 2, seed=0, shuffle=False)
    loader.load_state_dict(saved.state_dict())
    assert [numbers(batch) for batch in loader] == then
    assert f"training rows was 8 when the checkpoint was saved and is {rows} now" in caplog.text


def test_an_incomplete_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"lacks .*'batches_done'"):
        StatefulLoader(Numbers(8), 2, seed=0).load_state_dict({"epoch": 1})


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_row_raises_its_own_message(num_workers: int) -> None:
    loader = StatefulLoader(Numbers(4, bad=3), 2, seed=0, shuffle=False, num_workers=num_workers)
    batches = iter(loader)
    assert numbers(next(batches)) == [0, 1]
    with pytest.raises(DataError) as caught:
        next(batches)
    assert str(caught.value) == "row 3 is bad"


def test_train_loader(make_config: MakeConfig) -> None:
    config = make_config(train_batch_size=4, seed=9)
    loader = create_train_loader(Numbers(10), config)
    assert len(loader) == 2
    assert [len(numbers(batch)) for batch in loader] == [4, 4]
    assert loader.state_dict()["seed"] == 9
    in_order = create_train_loader(Numbers(10), make_config(train_batch_size=4, shuffle=False))
    assert numbers(next(iter(in_order))) == [0, 1, 2, 3]
    larger = create_train_loader(Numbers(10), make_config(train_batch_size=4, gen_batch_size=5))
    assert len(numbers(next(iter(larger)))) == 5
    with pytest.raises(DataError, match=r"has 3 rows, .* data.train_batch_size=4"):
        create_train_loader(Numbers(3), config)
    with pytest.raises(DataError, match=r"has 3 rows, .* data.gen_batch_size=5"):
        create_train_loader(Numbers(3), make_config(train_batch_size=2, gen_batch_size=5))


def test_val_loader_is_the_whole_set_or_batches_in_a_fixed_order(make_config: MakeConfig) -> None:
    whole = create_val_loader(Numbers(5), make_config())
    assert len(whole) == 1
    assert [numbers(batch) for batch in whole] == [[0, 1, 2, 3, 4]]
    parts = create_val_loader(Numbers(5), make_config(val_batch_size=2))
    assert len(parts) == 3
    assert [numbers(batch) for batch in parts] == [[0, 1], [2, 3], [4]]
    shuffled = create_val_loader(Numbers(9), make_config(validation_shuffle=True))
    first, second = list(map(numbers, shuffled)), list(map(numbers, shuffled))
    assert first == second
    assert sorted(first[0]) == list(range(9)) != first[0]
    with pytest.raises(DataError, match="the validation set has 0 rows"):
        create_val_loader(Numbers(0), make_config())
