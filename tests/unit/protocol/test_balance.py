from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caldera.errors import ConfigError, ProtocolError
from caldera.protocol.balance import (
    balance_partitions,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
    micro_batches_by_count,
    micro_batches_by_tokens,
    workload,
)

lengths_lists = st.lists(st.integers(0, 60_000), min_size=1, max_size=24)


def sums(values: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(values[i] for i in part) for part in parts]


def test_workload() -> None:
    assert workload(0) == 0
    assert workload(10) == 245_860


def test_karmarkar_karp_on_the_classic_example() -> None:
    # 8-7=1, 6-5=1, 4-1=3, 3-1=2: differencing ends at 2, though 8+7 = 6+5+4.
    values = [8, 7, 6, 5, 4]
    parts = get_seqlen_balanced_partitions(values, 2, equal_size=False)
    assert sorted(sums(values, parts)) == [14, 16]


def test_three_ways() -> None:
    values = [9, 8, 7, 3, 2, 1]
    for equal_size in (False, True):
        parts = get_seqlen_balanced_partitions(values, 3, equal_size)
        assert sums(values, parts) == [10, 10, 10]
        assert sorted(parts) == [[0, 5], [1, 4], [2, 3]]


@settings(deadline=None)
@given(values=lengths_lists, data=st.data())
def test_parts_are_non_empty_and_cover_everything(values: list[int], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    equal_size = len(values) % k == 0 and data.draw(st.booleans())
    parts = get_seqlen_balanced_partitions(values, k, equal_size)
    assert len(parts) == k
    assert all(parts)
    assert sorted(itertools.chain(*parts)) == list(range(len(values)))
    if equal_size:
        assert {len(part) for part in parts} == {len(values) // k}
    assert parts == get_seqlen_balanced_partitions(values, k, equal_size)


def test_parts_of_many_sequences_are_close() -> None:
    values = [(i * 7919) % 1000 + 1 for i in range(512)]
    for equal_size in (False, True):
        totals = sums(values, get_seqlen_balanced_partitions(values, 8, equal_size))
        assert max(totals) - min(totals) <= 2


def test_splits_that_cannot_be() -> None:
    with pytest.raises(ProtocolError, match="2 sequences cannot be split into 3 non-empty parts"):
        get_seqlen_balanced_partitions([1, 2], 3, equal_size=False)
    with pytest.raises(ProtocolError, match=r"3 sequences .* into 2 parts of equal size"):
        get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True)


def test_parts_have_short_sequences_at_both_ends() -> None:
    lengths = [5, 1, 6, 2, 7, 3, 8, 4]
    (whole,) = balance_partitions(lengths, 1)
    assert [lengths[i] for i in whole] == [2, 4, 6, 8, 7, 5, 3, 1]
    parts = balance_partitions(lengths, 2)
    assert sorted(sums(lengths, parts)) == [18, 18]
    for part in parts:
        first, *middle, last = [lengths[i] for i in part]
        assert max(first, last) < min(middle)


def test_unbalance_metrics() -> None:
    lengths = [1, 2, 8, 9]
    assert log_seqlen_unbalance(lengths, [[0, 3], [1, 2]]) == {
        "global_seqlen/min": 3,
        "global_seqlen/max": 17,
        "global_seqlen/minmax_diff": 14,
        "global_seqlen/balanced_min": 10,
        "global_seqlen/balanced_max": 10,
        "global_seqlen/mean": 10.0,
    }


def test_micro_batches_by_tokens_on_an_example() -> None:
    lengths = [10, 20, 30, 40]
    assert micro_batches_by_tokens(lengths, 100) == [[0, 1, 2, 3]]
    assert sorted(map(sorted, micro_batches_by_tokens(lengths, 50))) == [[0, 3], [1, 2]]
    # ceil(120 / 50) = 3 parts do not fit: two sequences would share one of them.
    assert sorted(micro_batches_by_tokens([30, 30, 30, 30], 50)) == [[0], [1], [2], [3]]


def test_the_heaviest_micro_batch_stands_in_the_middle() -> None:
    lengths = [50, 10, 40, 20, 30]
    parts = micro_batches_by_tokens(lengths, 50, min_count=5)
    assert [lengths[part[0]] for part in parts] == [10, 30, 50, 40, 20]


@settings(deadline=None)
@given(lengths=lengths_lists, slack=st.integers(0, 100_000), data=st.data())
def test_micro_batches_fit_cover_and_agree_on_a_number(
    lengths: list[int], slack: int, data: st.DataObject
) -> None:
    max_tokens = max(max(lengths), 1) + slack
    own = micro_batches_by_tokens(lengths, max_tokens)
    assert len(own) >= max(1, -(-sum(lengths) // max_tokens))
    min_count = data.draw(st.integers(1, len(lengths)))
    parts = micro_batches_by_tokens(lengths, max_tokens, min_count)
    assert len(parts) == max(len(own), min_count)
    assert all(parts)
    assert max(sums(lengths, parts)) <= max_tokens
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))


def test_a_count_that_the_heuristic_cannot_fit_is_still_reached() -> None:
    lengths = [56788, 13286, 7377, 851, 20552, 7860, 52425, 27318, 19361, 57095, 56383]
    max_tokens = 87612
    work = [workload(n) for n in lengths]
    five = get_seqlen_balanced_partitions(work, 5, equal_size=False)
    assert max(sums(lengths, five)) > max_tokens
    assert len(micro_batches_by_tokens(lengths, max_tokens)) == 4
    parts = micro_batches_by_tokens(lengths, max_tokens, min_count=5)
    assert len(parts) == 5
    assert max(sums(lengths, parts)) <= max_tokens


def test_a_sequence_beyond_the_budget_names_both_numbers() -> None:
    with pytest.raises(ConfigError, match="a sequence of 12 tokens does not fit the budget of 10"):
        micro_batches_by_tokens([3, 12], 10)


def test_micro_batches_by_count() -> None:
    assert micro_batches_by_count(5, 2) == [[0, 1], [2, 3], [4]]
    assert micro_batches_by_count(0, 2) == []
    with pytest.raises(ConfigError, match="got a size of 0"):
        micro_batches_by_count(3, 0)


@settings(deadline=None)
@given(
    groups=st.lists(st.integers(1, 5_000), min_size=2, max_size=12),
    together=st.integers(2, 3),
    data=st.data(),
)
def test_groups_stay_together(groups: list[int], together: int, data: st.DataObject) -> None:
    lengths = [n + i for n in groups for i in range(together)]
    most = max(sum(lengths[g * together : (g + 1) * together]) for g in range(len(groups)))
    min_count = data.draw(st.integers(1, len(groups)))
    by_tokens = micro_batches_by_tokens(lengths, most + 7, min_count, together)
    assert len(by_tokens) >= min_count
    assert max(sums(lengths, by_tokens)) <= most + 7
    by_count = micro_batches_by_count(len(lengths), 2 * together, together)
    balanced = balance_partitions(lengths, data.draw(divisors_of(len(groups))), together)
    assert len({len(part) for part in balanced}) == 1
    for parts in (by_tokens, by_count, balanced):
        assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
        for part in parts:
            firsts = part[::together]
            assert all(first % together == 0 for first in firsts)
            assert part == [first + i for first in firsts for i in range(together)]


def divisors_of(n: int) -> st.SearchStrategy[int]:
    return st.sampled_from([k for k in range(1, n + 1) if n % k == 0])


def test_the_work_of_a_group_is_that_of_its_members() -> None:
    # Together 100 and 90 tokens; attention makes the second group the heavier one.
    lengths = [50_000, 50_000, 90_000, 0]
    parts = micro_batches_by_tokens([*lengths, 10, 10], 100_000, min_count=3, together=2)
    assert parts[1] == [2, 3]


def test_a_group_beyond_the_budget() -> None:
    expected = "a group of 2 sequences of 14 tokens does not fit the budget of 10"
    with pytest.raises(ConfigError, match=expected):
        micro_batches_by_tokens([1, 2, 8, 6], 10, together=2)


def test_what_is_no_groups() -> None:
    with pytest.raises(ProtocolError, match="3 sequences are not groups of 2"):
        micro_batches_by_tokens([1, 2, 3], 10, together=2)
    for n, size in ((3, 2), (4, 3)):
        with pytest.raises(ProtocolError, match=f"{n} sequences, {size} at a time, are not groups"):
            micro_batches_by_count(n, size, together=2)
