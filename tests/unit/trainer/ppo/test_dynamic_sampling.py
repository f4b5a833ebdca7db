"""Which groups teach something, and how many batches a step takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from caldera.config import PPOTrainerConfig
from caldera.errors import ConfigError, DataError
from caldera.protocol import DataProto
from caldera.trainer.sources import GroupFilter, informative_rows

NO_FAILURES = {"reward/failed": 0.0, "reward/timed_out": 0.0, "reward/failure_rate": 0.0}


def scored(scores: list[float], uids: str, acc: list[float] | None = None) -> DataProto:
    """One token a sample; `uids` has a letter a sample."""
    columns = {"uid": np.array(list(uids), dtype=object)}
    if acc is not None:
        columns["acc"] = np.array(acc, dtype=object)
    return DataProto.from_dict({"token_level_scores": torch.tensor(scores)[:, None]}, columns)


def config(enable: bool = True, prompts: int = 2, most: int = 0) -> PPOTrainerConfig:
    made = PPOTrainerConfig()
    made.algorithm.filter_groups.enable = enable
    made.algorithm.filter_groups.metric = "score"
    made.algorithm.filter_groups.max_num_gen_batches = most
    made.data.train_batch_size = prompts
    made.actor_rollout_ref.rollout.n = 2
    return made


def test_groups_whose_values_differ_are_informative() -> None:
    batch = scored([1, 1, 0, 1, 0, 0, 0.5], "aabbccd")
    assert informative_rows(batch, "score").tolist() == [False] * 2 + [True] * 2 + [False] * 2 + [
        True  # alone in its group
    ]


def test_a_value_of_the_scorers_decides() -> None:
    batch = scored([1, 1, 0, 1], "aabb", acc=[0, 1, 1, 1])
    assert informative_rows(batch, "acc").tolist() == [True, True, False, False]
    assert informative_rows(batch, "seq_reward").tolist() == [False, False, True, True]


def test_members_of_a_group_need_not_be_neighbours() -> None:
    assert informative_rows(scored([1, 0, 0, 0], "abab"), "score").tolist() == [
        True, False, True, False,
    ]  # fmt: skip


def test_an_unknown_value_lists_the_known_ones() -> None:
    batch = scored([1, 1], "aa", acc=[1, 1])
    with pytest.raises(ConfigError, match=r"metric='accuracy': takes score, .*the rows have acc"):
        informative_rows(batch, "accuracy")


def test_without_the_filter_one_batch_is_handed_back() -> None:
    groups = GroupFilter(config(enable=False))
    assert not groups.enough
    batch = scored([1, 1], "aa")
    groups.add(batch)
    assert groups.enough
    taken, metrics = groups.take()
    assert taken is batch
    assert metrics == NO_FAILURES


def test_batches_are_collected_until_there_are_enough_prompts() -> None:
    groups = GroupFilter(config(prompts=2))
    groups.add(scored([1, 0, 1, 1], "aabb"))
    assert not groups.enough
    groups.add(scored([0, 0], "cc"))  # nothing of it is kept
    assert not groups.enough
    groups.add(scored([0, 1, 1, 0], "ddee"))
    assert groups.enough and groups.batches == 3
    batch, metrics = groups.take()
    assert batch.non_tensor_batch["uid"].tolist() == list("aadd")  # e is one too many
    assert metrics == NO_FAILURES | {
        "training/num_gen_batches": 3.0,
        "training/filter_groups/kept_ratio": 3 / 5,
        "training/filter_groups/evicted_samples": 4.0,
    }


def test_the_limit_is_told() -> None:
    groups = GroupFilter(config(prompts=2, most=2))
    groups.add(scored([1, 0], "aa"))
    with pytest.raises(DataError, match=r"max_num_gen_batches=2 .* only 1 of the 2 prompts"):
        groups.add(scored([0, 0], "bb"))


def test_the_last_allowed_batch_may_be_enough() -> None:
    groups = GroupFilter(config(prompts=2, most=2))
    groups.add(scored([1, 0], "aa"))
    groups.add(scored([1, 0], "bb"))
    assert groups.enough


def with_failures(batch: DataProto, states: list[str]) -> DataProto:
    batch.non_tensor_batch["reward_state"] = np.array(states, dtype=object)
    assert batch.batch is not None
    batch.batch["has_reward"] = torch.tensor([state == "value" for state in states])
    return batch


def test_a_sample_without_a_reward_says_nothing_of_its_group() -> None:
    v, f = "value", "failed"
    batch = scored([1, 1, 0, 1, 0, 0, 0, 0], "aaabbccd", acc=[1, 1, None, 1, None, None, None, 0])
    batch = with_failures(batch, [v, v, f, v, f, f, f, v])
    for metric in ("score", "acc"):
        kept = informative_rows(batch, metric).tolist()
        # a: the two that count agree; b: one is left of two; c: none; d was alone from the start
        assert kept == [False] * 7 + [True]


def test_a_batch_in_which_everything_failed_has_no_values_at_all() -> None:
    batch = with_failures(scored([0, 0], "aa"), ["failed", "failed"])
    assert informative_rows(batch, "acc").tolist() == [False, False]
    assert batch.batch is not None
    batch.batch["has_reward"][:] = True  # scored 0
    assert informative_rows(batch, "acc").tolist() == [False, False]


def test_a_failing_scorer_does_not_end_the_run() -> None:
    groups = GroupFilter(config(prompts=2, most=2))
    v, f = "value", "failed"
    groups.add(with_failures(scored([1, 0, 0, 0], "aabb", [1, 0, 0, None]), [v, v, v, f]))
    assert not groups.enough  # b is to be replaced, as long as it may be
    groups.add(with_failures(scored([1, 1, 0, 0], "ccdd"), [v, v, f, f]))
    assert groups.enough
    batch, metrics = groups.take()
    assert batch.non_tensor_batch["uid"].tolist() == list("aabb")
    assert batch.batch is not None
    assert batch.batch["has_reward"].tolist() == [True, True, False, False]
    assert metrics["reward/failed"] == 3.0
    assert metrics["training/filter_groups/kept_ratio"] == 1 / 4


@pytest.mark.parametrize("on_failure", ["mask", "zero"])
def test_a_scorer_that_always_fails_does_not_keep_a_step_for_ever(on_failure: str) -> None:
    groups = GroupFilter(config(prompts=3))  # without a limit of batches
    for uids in ("aabb", "ccdd"):
        assert not groups.enough
        batch = with_failures(scored([0] * 4, uids), ["failed"] * 4)
        if on_failure == "zero":
            assert batch.batch is not None
            batch.batch["has_reward"][:] = True
        groups.add(batch)
    assert groups.enough
    assert sum(map(len, groups._unjudged)) == 6, "more is kept than a step needs"
    taken, metrics = groups.take()
    assert taken.non_tensor_batch["uid"].tolist() == list("aabbcc")
    assert taken.batch is not None and not taken.batch["has_reward"].any()
    assert metrics["reward/failed"] == 8.0


def test_no_more_failures_are_kept_than_a_step_needs() -> None:
    groups = GroupFilter(config(prompts=1, most=3))
    for uids in ("aabb", "ccdd", "eeff"):
        groups.add(with_failures(scored([0] * 4, uids), ["failed"] * 4))
    assert sum(map(len, groups._unjudged)) == 2
    assert groups.take()[0].non_tensor_batch["uid"].tolist() == ["a", "a"]


def test_failures_do_not_excuse_prompts_that_teach_nothing() -> None:
    groups = GroupFilter(config(prompts=3, most=1))
    v, f = "value", "failed"
    with pytest.raises(DataError, match=r"only 1 of the 3 prompts"):
        groups.add(with_failures(scored([1, 0, 0, 0, 1, 1], "aabbcc"), [v, v, v, f, v, v]))


def test_enough_prompts_leave_no_room_for_failures() -> None:
    groups = GroupFilter(config(prompts=1, most=1))
    groups.add(with_failures(scored([0, 0, 1, 0], "aabb"), ["failed", "value", "value", "value"]))
    assert groups.take()[0].non_tensor_batch["uid"].tolist() == ["b", "b"]


def test_batches_with_and_without_failures_make_one() -> None:
    groups = GroupFilter(config(prompts=2))
    mixed = with_failures(scored([1, 0, 0, 0], "aabb", [1, 0, 0, None]), [*["value"] * 3, "failed"])
    assert mixed.batch is not None
    groups.add(mixed)
    clean = scored([1, 0], "cc", [1, 0])
    assert clean.batch is not None
    clean.batch["has_reward"] = torch.ones(2, dtype=torch.bool)
    groups.add(clean)
    batch, metrics = groups.take()
    assert batch.non_tensor_batch["reward_state"].tolist() == ["value", "value", None, None]
    assert metrics["reward/failed"] == 1.0
    assert metrics["reward/failure_rate"] == pytest.approx(1 / 6)
