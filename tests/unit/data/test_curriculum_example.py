"""The example of a curriculum, told by hand what came of its rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from caldera.config import DataConfig
from caldera.data import StatefulLoader, create_train_loader, object_array
from caldera.protocol import DataProto

MakeConfig = Callable[..., DataConfig]

EXAMPLE = Path(__file__).parents[3] / "examples/curriculum/easy_first.py"


def make_loader(make_config: MakeConfig, rows: int, batch_size: int) -> StatefulLoader:
    config = make_config(train_batch_size=batch_size)
    config.sampler.class_path, config.sampler.class_name = str(EXAMPLE), "EasyFirst"
    return create_train_loader([{"number": row} for row in range(rows)], config)


def drawn(batch: Any) -> list[int]:
    return [int(row) for row in batch["dataset_row"]]


def tell(loader: StatefulLoader, scores: list[tuple[int, float]]) -> None:
    """One answer an item: its row, and the reward of its last of two tokens."""
    rows, rewards = zip(*scores, strict=True)
    batch = DataProto.from_dict(
        tensors={"token_level_scores": torch.tensor([[0.0, reward] for reward in rewards])},
        non_tensors={"dataset_row": object_array(rows)},
    )
    loader.on_batch_end(batch)


def test_what_is_half_known_comes_again(make_config: MakeConfig) -> None:
    loader = make_loader(make_config, rows=12, batch_size=4)
    batches = iter(loader)
    known, learning, hopeless, also_learning = first = drawn(next(batches))
    assert len(set(first)) == 4
    groups = {known: (1, 1), learning: (0, 1), hopeless: (0, 0), also_learning: (0.5, 0)}
    tell(loader, [(row, rewards[k]) for k in range(2) for row, rewards in groups.items()])
    second = drawn(next(batches))
    assert second[1::2] == [learning, also_learning]
    assert not {second[0], second[2]} & set(first)
    tell(loader, [(row, 1) for row in second])  # both are known now
    third = drawn(next(batches))
    assert len({*first, *second, *third}) == 4 + 2 + 4


def test_without_rewards_it_walks_through_all_rows(make_config: MakeConfig) -> None:
    loader = make_loader(make_config, rows=6, batch_size=2)
    walks = [[row for batch in loader for row in drawn(batch)] for _ in range(2)]
    assert [sorted(walk) for walk in walks] == [list(range(6))] * 2
    assert walks[0] != walks[1]
    again = make_loader(make_config, rows=6, batch_size=2)
    assert [row for batch in again for row in drawn(batch)] == walks[0]


def test_it_resumes_bit_for_bit(make_config: MakeConfig) -> None:
    def run(loader: StatefulLoader, steps: int) -> list[list[int]]:
        seen: list[list[int]] = []
        while len(seen) < steps:
            for batch in itertools.islice(loader, steps - len(seen)):
                rows = drawn(batch)
                seen.append(rows)
                tell(loader, [(row, float((row + k) % 3 == 0)) for row in rows for k in range(2)])
        return seen

    expected = run(make_loader(make_config, rows=10, batch_size=4), 9)
    for stop in range(1, 9):
        first = make_loader(make_config, rows=10, batch_size=4)
        before = run(first, stop)
        second = make_loader(make_config, rows=10, batch_size=4)
        second.load_state_dict(first.state_dict())
        assert before + run(second, 9 - stop) == expected
