"""Rows are balanced over ranks, within mini-batches, and come back in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from caldera.protocol import DataProto, tensors_of
from caldera.single_controller import Balancing, Dispatch, Worker, WorkerGroup, register


def test_without_balancing_rows_are_dealt_in_order() -> None:
    assert Balancing(False).partition([1] * 4, 2) == [[0, 1], [2, 3]]
    assert Balancing(False, 4).partition([1] * 8, 2, True) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_ranks_get_the_same_work() -> None:
    lengths = [100, 1, 1, 100, 50, 51, 50, 49]
    parts = Balancing().partition(lengths, 2)
    assert sorted(parts[0] + parts[1]) == list(range(8))
    first, second = (sum(lengths[row] for row in part) for part in parts)
    assert abs(first - second) <= 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("balance", [False, True])
def test_a_mini_batch_has_the_same_members_for_any_number_of_ranks(
    ranks: int, balance: bool
) -> None:
    lengths = [(7 * i) % 13 + 1 for i in range(24)]
    parts = Balancing(balance, 8).partition(lengths, ranks, in_mini_batches=True)
    share = 8 // ranks
    for number in range(3):
        members = [row for part in parts for row in part[number * share : (number + 1) * share]]
        assert sorted(members) == list(range(number * 8, (number + 1) * 8))


class Doubler(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"doubled": 2 * tensors_of(data)["value"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, in_mini_batches=True)
    def update(self, data: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"rows": tensors_of(data)["value"].tolist()}})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, needs=("value", "attention_mask"))
    def keys_of(self, data: DataProto) -> DataProto:
        count = len(list(tensors_of(data).keys()))
        return DataProto.from_dict({"keys": torch.full((len(data),), count)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def say(self, text: str) -> str:
        return f"{text} {self.rank}"


class Ranks(WorkerGroup):
    """Several ranks in this process."""

    def __init__(self, count: int, balancing: Balancing | None = None) -> None:
        self.workers = [Doubler() for _ in range(count)]
        for rank, worker in enumerate(self.workers):
            worker.place(rank, count)
        super().__init__(Doubler, count)
        self.balancing = balancing

    def _submit(
        self, rank: int, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return getattr(self.workers[rank], method_name)(*args, **kwargs)

    def _resolve(self, pending: list[Any]) -> list[Any]:
        return pending

    def shutdown(self) -> None:
        self.workers.clear()


def batch_of(lengths: list[int]) -> DataProto:
    mask = torch.tensor([[1] * n + [0] * (16 - n) for n in lengths])
    return DataProto.from_dict({"value": torch.arange(len(lengths)), "attention_mask": mask})


@pytest.mark.parametrize("rows", [3, 4, 7, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_answers_come_back_in_the_batchs_order(rows: int, ranks: int) -> None:
    batch = batch_of([(5 * i) % 11 + 1 for i in range(rows)])
    group = Ranks(ranks, Balancing())
    answer = tensors_of(group.double(batch))["doubled"]
    assert answer.tolist() == [2 * i for i in range(rows)]
    assert tensors_of(batch)["value"].tolist() == list(range(rows))


def test_only_what_a_method_needs_is_copied_and_sent() -> None:
    group = Ranks(2, Balancing())
    batch = batch_of([1, 2, 3, 4])
    tensors_of(batch)["other"] = torch.zeros(4)
    seen = tensors_of(group.keys_of(batch))["keys"]
    assert seen.tolist() == [2, 2, 2, 2]  # value and attention_mask, not other


def test_an_update_is_dealt_by_mini_batches() -> None:
    group = Ranks(2, Balancing(False, 4))
    metrics = group.update(batch_of([1] * 8)).meta_info["metrics"]
    assert metrics["rows"] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_calls_without_a_batch_go_through() -> None:
    assert Ranks(2, Balancing()).say("rank") == ["rank 0", "rank 1"]


def test_the_balance_is_measured_where_there_is_one() -> None:
    batch = batch_of([10, 10, 1, 1])
    assert Ranks(1, Balancing()).balance_metrics(batch) == {}
    metrics = Ranks(2, Balancing()).balance_metrics(batch)
    assert (metrics["global_seqlen/minmax_diff"], metrics["global_seqlen/balanced_max"]) == (18, 11)


@pytest.mark.parametrize("pairs", [1, 3, 4, 7])
@pytest.mark.parametrize("balance", [False, True])
def test_pairs_stay_together(pairs: int, balance: bool) -> None:
    batch = batch_of([(5 * i) % 11 + 1 for i in range(2 * pairs)])
    group = Ranks(2, Balancing(balance, rows_together=2))
    assert tensors_of(group.double(batch))["doubled"].tolist() == list(range(0, 4 * pairs, 2))
    seen = group.update(batch).meta_info["metrics"]["rows"]  # of each rank
    assert len(seen[0]) == len(seen[1])
    for rows in seen:
        assert all(first % 2 == 0 for first in rows[::2])
        assert rows[1::2] == [first + 1 for first in rows[::2]]
    assert {row for rows in seen for row in rows} == set(range(2 * pairs))
