"""Repetitions, uids and seeds of the rows of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from caldera.agent_loop.output import COLUMN
from caldera.data import Batch, object_array
from caldera.errors import ConfigError
from caldera.protocol import DataProto
from caldera.seeds import derive_seed
from caldera.trainer.ppo.prompts import check_loops, stamp_rows

META = {"eos_token_id": 2}


def rows(count: int = 3, **columns: Any) -> Batch:
    ids = torch.arange(count * 4).view(count, 4)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": ids.clone(),
        "data_source": object_array([f"source {i}" for i in range(count)]),
        **columns,
    }


def stamp(
    repeats: int = 2, root: int = 42, place: tuple[int | str, ...] = ("train", 5)
) -> tuple[DataProto, DataProto]:
    return stamp_rows(rows(), repeats, root, place, META)


def test_every_row_is_repeated_next_to_itself() -> None:
    prompts, batch = stamp()
    assert prompts.batch is not None
    assert prompts.batch["input_ids"][:, 0].tolist() == [0, 0, 4, 4, 8, 8]
    assert list(batch.non_tensor_batch["data_source"]) == [
        f"source {i}" for i in (0, 0, 1, 1, 2, 2)
    ]


def test_repetitions_share_a_uid_and_not_a_seed() -> None:
    prompts, batch = stamp()
    assert list(batch.non_tensor_batch["uid"]) == [f"train-5-{i}" for i in (0, 0, 1, 1, 2, 2)]
    seeds = list(prompts.non_tensor_batch["sample_seed"])
    assert seeds == [derive_seed(42, "train", 5, i, k) for i in range(3) for k in range(2)]
    assert len(set(seeds)) == 6
    assert all(isinstance(seed, int) for seed in seeds)


def test_the_same_place_gives_the_same_stamps() -> None:
    first, second = stamp(), stamp()
    for one, two in zip(first, second, strict=True):
        for name, column in one.non_tensor_batch.items():
            assert list(column) == list(two.non_tensor_batch[name])


@pytest.mark.parametrize("other", [{"root": 43}, {"place": ("train", 6)}, {"place": ("val", 5)}])
def test_another_root_or_place_gives_other_seeds(other: dict[str, Any]) -> None:
    seeds = set(stamp()[0].non_tensor_batch["sample_seed"])
    assert not seeds & set(stamp(**other)[0].non_tensor_batch["sample_seed"])


def test_more_repetitions_keep_the_seeds_of_the_first() -> None:
    few, many = stamp(repeats=2)[0], stamp(repeats=3)[0]
    seeds = list(many.non_tensor_batch["sample_seed"])
    kept = [seed for position, seed in enumerate(seeds) if position % 3 < 2]
    assert kept == list(few.non_tensor_batch["sample_seed"])


def test_the_sampler_gets_what_it_needs_and_no_more() -> None:
    prompts, batch = stamp()
    assert prompts.batch is not None
    assert set(prompts.batch.keys()) == {"input_ids", "attention_mask", "position_ids"}
    assert set(prompts.non_tensor_batch) == {"sample_seed"}
    assert prompts.meta_info == META
    assert set(batch.non_tensor_batch) == {"data_source", "uid"}
    assert len(prompts) == len(batch) == 6
    assert "eos_token_id" not in batch.meta_info


def test_unpadded_prompts_go_to_the_sampler() -> None:
    given = rows(raw_prompt_ids=object_array([[1], [2, 3], [4]]))
    prompts, batch = stamp_rows(given, 1, 0, ("val",), META)
    assert list(prompts.non_tensor_batch["raw_prompt_ids"]) == [[1], [2, 3], [4]]
    assert "raw_prompt_ids" not in batch.non_tensor_batch


def test_the_loaders_rows_are_left_alone() -> None:
    given = rows()
    keys = set(given)
    stamp_rows(given, 2, 0, ("val",), META)
    assert set(given) == keys
    assert len(given["input_ids"]) == 3


def test_rows_of_agents_are_not_sampled_as_single_turns() -> None:
    def batch(**columns: list[Any]) -> DataProto:
        return DataProto(non_tensor_batch={k: object_array(v) for k, v in columns.items()})

    asking = batch(agent_name=["tool_agent", None, "single_turn_agent"])
    with pytest.raises(ConfigError, match=r"agent loops tool_agent, but no loop runs"):
        check_loops(asking, batch(uid=[1, 2, 3]))
    check_loops(asking, batch(**{COLUMN: [1, 2, 3]}))
    check_loops(batch(agent_name=["single_turn_agent", None]), batch(uid=[1, 2]))
