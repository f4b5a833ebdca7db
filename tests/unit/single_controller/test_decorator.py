"""What each rank gets of a call, and what comes back of their answers."""

from __future__ import annotations

import pytest
import torch

from caldera.errors import ProtocolError
from caldera.protocol import DataProto
from caldera.single_controller import Dispatch, Execute, register
from caldera.single_controller.decorator import ATTRIBUTE, collect, dispatch, registration_of


def rows(*values: int) -> DataProto:
    return DataProto.from_dict({"x": torch.tensor(values)}, meta_info={"temperature": 1.0})


def values(data: DataProto) -> list[int]:
    assert data.batch is not None
    found: list[int] = data.batch["x"].tolist()
    return found


def test_every_rank_gets_its_rows() -> None:
    shares = dispatch(
        Dispatch.DP_COMPUTE_PROTO, 2, (rows(1, 2, 3, 4), "all"), {"more": rows(5, 6), "n": 3}
    )
    assert len(shares) == 2
    for (args, kwargs), own, more in zip(shares, ([1, 2], [3, 4]), ([5], [6]), strict=True):
        assert values(args[0]) == own
        assert args[0].meta_info == {"temperature": 1.0}
        assert args[1] == "all"
        assert values(kwargs["more"]) == more
        assert kwargs["n"] == 3


def test_rows_that_do_not_divide_are_refused_unless_padded() -> None:
    with pytest.raises(ProtocolError, match="3 rows do not make 2 equal chunks"):
        dispatch(Dispatch.DP_COMPUTE_PROTO, 2, (rows(1, 2, 3),), {})
    data = DataProto.from_dict({"x": torch.tensor([1, 2, 3])}, auto_padding=True)
    shares = dispatch(Dispatch.DP_COMPUTE_PROTO, 2, (data,), {})
    assert [values(args[0]) for args, _ in shares] == [[1, 2], [3]]


def test_answers_are_joined_in_the_order_of_the_ranks() -> None:
    outputs = [rows(1, 2), rows(3)]
    outputs[0].meta_info["metrics"] = {"loss": 1.0}
    outputs[1].meta_info["metrics"] = {"loss": 2.0}
    joined = collect(Dispatch.DP_COMPUTE_PROTO, outputs)
    assert values(joined) == [1, 2, 3]
    assert joined.meta_info == {"temperature": 1.0, "metrics": {"loss": [1.0, 2.0]}}


def test_cutting_and_joining_is_nothing() -> None:
    data = rows(1, 2, 3, 4, 5, 6)
    for world_size in (1, 2, 3):
        shares = dispatch(Dispatch.DP_COMPUTE_PROTO, world_size, (data,), {})
        joined = collect(Dispatch.DP_COMPUTE_PROTO, [args[0] for args, _ in shares])
        assert values(joined) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("mode", [Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO])
def test_everybody_gets_the_same(mode: Dispatch) -> None:
    data = rows(1, 2)
    shares = dispatch(mode, 2, (data, [7, 8]), {"step": 5})
    assert shares == [([data, [7, 8]], {"step": 5})] * 2
    assert shares[0][0] is not shares[1][0]


def test_lists_are_scattered_when_all_have_one_for_each_rank() -> None:
    scattered = dispatch(Dispatch.ALL_TO_ALL, 2, (["a", "b"],), {"n": [1, 2]})
    assert scattered == [(["a"], {"n": 1}), (["b"], {"n": 2})]
    shared = dispatch(Dispatch.ALL_TO_ALL, 2, (["a", "b"],), {"n": 1})
    assert shared == [([["a", "b"]], {"n": 1})] * 2
    assert dispatch(Dispatch.ALL_TO_ALL, 2, (), {}) == [([], {})] * 2


def test_answers_that_are_no_rows() -> None:
    assert collect(Dispatch.ONE_TO_ALL, ["a", "b"]) == ["a", "b"]
    assert collect(Dispatch.ALL_TO_ALL, ["a", "b"]) == ["a", "b"]
    assert collect(Dispatch.RANK_ZERO, ["a", "b"]) == "a"


def test_register_leaves_a_note_and_the_function() -> None:
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def double(x: int) -> int:
        return 2 * x

    assert double(4) == 8
    found = registration_of(double)
    assert found is not None
    assert (found.dispatch_mode, found.execute_mode) == (Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    assert getattr(double, ATTRIBUTE) is found
    assert registration_of(len) is None


def test_register_alone() -> None:
    @register()
    def work() -> None: ...

    found = registration_of(work)
    assert found is not None
    assert (found.dispatch_mode, found.execute_mode) == (Dispatch.ALL_TO_ALL, Execute.ALL)
