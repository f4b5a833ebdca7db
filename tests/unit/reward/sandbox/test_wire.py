from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caldera.sandbox.inside.wire import MAX_DEPTH, decode, encode

leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.complex_numbers(allow_nan=False) | st.binary(max_size=5)
    | st.sampled_from([int, str, range(3)])
)  # fmt: skip
hashable = leaves | st.tuples(leaves, leaves) | st.frozensets(leaves, max_size=3)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.sets(hashable, max_size=3)
        | st.dictionaries(hashable, inner, max_size=3)
    ),
    max_leaves=5,
)


def no_reference(value: Any) -> Any:
    raise LookupError(value)


@settings(deadline=None)
@given(values)
def test_values_survive_the_way(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value, no_reference))), no_reference)
    assert back == value
    assert type(back) is type(value)


def test_long_integers_have_no_limit() -> None:
    assert decode(encode(10**5000, no_reference), no_reference) == 10**5000


def test_other_objects_are_referred_to() -> None:
    class Own:
        pass

    assert encode([Own], lambda value: value.__name__) == {"list": [{"reference": "Own"}]}
    assert decode({"reference": 7}, lambda reference: reference * 2) == 14
    with pytest.raises(LookupError):
        encode(len, no_reference)


def test_values_of_subclasses_lose_their_methods() -> None:
    class Right(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    assert decode(encode(Right(7), no_reference), no_reference) != 8


def test_a_cycle_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match="nested too deeply"):
        encode(cycle, no_reference)
    deep: Any = 0
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert decode(encode(deep, no_reference), no_reference) == deep


@pytest.mark.parametrize(
    "data",
    [
        1, [], {}, {"list": [], "tuple": []}, {"object": 1}, {"type": "len"}, {"type": []},
        {"list": 3}, {"int": 5}, {"set": [{"list": []}]}, {"dict": [[None]]}, {"range": "x"},
    ],
)  # fmt: skip
def test_what_nobody_encoded_is_refused(data: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode(data, no_reference)
