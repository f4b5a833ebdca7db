"""What each rank gets of a call, and what comes back of their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from caldera.errors import ProtocolError
from caldera.protocol import BatchData, DataProto, DataProtoConfig, DataProtoFuture
from caldera.single_controller import (
    Dispatch,
    Execute,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

Ranks = Callable[..., Any]


def rows(*values: int, auto_padding: bool = False, **meta: Any) -> DataProto:
    tensors = {"x": torch.tensor(values, dtype=torch.long)}
    names = {"name": np.array([f"row {v}" for v in values], dtype=object)}
    return DataProto.from_dict(tensors, names, meta, auto_padding=auto_padding)


def values(data: Any) -> list[int]:
    found: list[int] = data.batch["x"].tolist()
    return found


def tell(value: Any) -> Any:
    """A value that can be compared: rows as their numbers."""
    return values(value) if isinstance(value, DataProto) else value


def only_last_two(group: Any, *args: Any) -> tuple[Any, Any]:
    return tuple([value[-2:]] * group.world_size for value in args), {}


class Echo(Worker):
    """Answers with what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def _tell(self, args: Any, kwargs: Any) -> Any:
        told = [tell(value) for value in args], {name: tell(v) for name, v in kwargs.items()}
        self.calls.append(told)
        return self.rank, *told

    @register(Dispatch.ONE_TO_ALL)
    def one_to_all(self, *args: Any, **kwargs: Any) -> Any:
        return self._tell(args, kwargs)

    @register(Dispatch.RANK_ZERO)
    def rank_zero(self, *args: Any, **kwargs: Any) -> Any:
        return self._tell(args, kwargs)

    @register(Dispatch.ALL_TO_ALL)
    def all_to_all(self, *args: Any, **kwargs: Any) -> Any:
        return self._tell(args, kwargs)

    @register(Dispatch.DP_COMPUTE)
    def dp_compute(self, *args: Any, **kwargs: Any) -> Any:
        return self._tell(args, kwargs)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def metric(self, *args: Any, **kwargs: Any) -> Any:
        return self._tell(args, kwargs)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def proto(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        self._tell((data, *args), kwargs)
        return data

    @register(Dispatch.DP_COMPUTE_PROTO)
    def metrics_alone(self, data: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"rows": len(data)}})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def nothing(self, data: DataProto) -> None: ...

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def later(self, data: DataProto) -> DataProto:
        return data

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def later_to_all(self) -> int:
        return self.rank

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self) -> None: ...

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def only_first(self, *args: Any, **kwargs: Any) -> Any:
        return self._tell(args, kwargs)

    @register(Dispatch.ALL_TO_ALL, Execute.RANK_ZERO)
    def only_first_as_is(self, *args: Any, **kwargs: Any) -> Any:
        return self._tell(args, kwargs)

    @register(Dispatch.ALL_TO_ALL, Execute.RANK_ZERO, blocking=False)
    def only_first_later(self) -> Any:
        return self.rank

    @register({"dispatch_fn": only_last_two, "collect_fn": lambda group, answers: answers[-1]})
    def own_mode(self, *args: Any, **kwargs: Any) -> Any:
        return self._tell(args, kwargs)


# ---- whole values


def test_one_to_all(ranks: Ranks) -> None:
    group = ranks(Echo)
    got = group.one_to_all(1, [7, 8], step=5)
    assert got == [(0, [1, [7, 8]], {"step": 5}), (1, [1, [7, 8]], {"step": 5})]
    assert group.one_to_all() == [(0, [], {}), (1, [], {})]


def test_rank_zero_is_the_answer_of_the_first(ranks: Ranks) -> None:
    group = ranks(Echo)
    assert group.rank_zero("a", b=[1, 2]) == (0, ["a"], {"b": [1, 2]})
    assert [len(worker.calls) for worker in group.workers] == [1, 1]


def test_all_to_all_scatters_when_all_are_lists_of_one_a_rank(ranks: Ranks) -> None:
    group = ranks(Echo)
    assert group.all_to_all(["a", "b"], n=[1, 2]) == [(0, ["a"], {"n": 1}), (1, ["b"], {"n": 2})]
    assert group.all_to_all(["a", "b"], n=1)[1] == (1, [["a", "b"]], {"n": 1})
    assert group.all_to_all(["a", "b", "c"])[1] == (1, [["a", "b", "c"]], {})
    assert group.all_to_all(("a", "b"))[0] == (0, [("a", "b")], {})


def test_dp_compute_takes_lists_of_one_a_rank(ranks: Ranks) -> None:
    group = ranks(Echo)
    assert group.dp_compute([1, 2], k=[3, 4]) == [(0, [1], {"k": 3}), (1, [2], {"k": 4})]
    with pytest.raises(ProtocolError, match=r"argument 0: .* each of the 2 ranks, got 3 values"):
        group.dp_compute([1, 2, 3])
    with pytest.raises(ProtocolError, match=r"argument k: .*, got int"):
        group.dp_compute([1, 2], k=3)


def test_rank_zero_alone_runs(ranks: Ranks) -> None:
    group = ranks(Echo)
    assert group.only_first([1, 2], k=3) == (0, [[1, 2]], {"k": 3})
    assert group.only_first_as_is([1, 2]) == (0, [[1, 2]], {})
    assert group.only_first_later().result() == 0
    assert group.workers[1].calls == []


def test_functions_of_ones_own(ranks: Ranks) -> None:
    assert ranks(Echo).own_mode([1, 2, 3]) == (1, [[2, 3]], {})


def test_a_method_for_the_rollout_alone(ranks: Ranks) -> None:
    with pytest.raises(ProtocolError, match="not for calls of the group"):
        ranks(Echo).direct()


# ---- rows


def test_every_rank_gets_its_rows(ranks: Ranks) -> None:
    group = ranks(Echo)
    answer = group.proto(rows(1, 2, 3, 4, temperature=1.0), "all", more=rows(5, 6), n=[1, 2])
    assert group.workers[0].calls == [([[1, 2], "all"], {"more": [5], "n": [1, 2]})]
    assert group.workers[1].calls == [([[3, 4], "all"], {"more": [6], "n": [1, 2]})]
    assert values(answer) == [1, 2, 3, 4]
    assert answer.non_tensor_batch["name"].tolist() == ["row 1", "row 2", "row 3", "row 4"]
    assert answer.meta_info == {"temperature": 1.0}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_cutting_and_joining_is_nothing(ranks: Ranks, count: int) -> None:
    assert values(ranks(Echo, count).proto(rows(1, 2, 3, 4, 5, 6))) == [1, 2, 3, 4, 5, 6]


def test_metrics_of_all_ranks_are_lists(ranks: Ranks) -> None:
    answer = ranks(Echo).metrics_alone(rows(1, 2, 3, 4))
    assert answer.meta_info == {"metrics": {"rows": [2, 2]}}
    assert ranks(Echo).metric(rows(1, 2), k=1) == [(0, [[1]], {"k": 1}), (1, [[2]], {"k": 1})]


def test_answers_must_be_rows(ranks: Ranks) -> None:
    with pytest.raises(ProtocolError, match="NoneType is no DataProto"):
        ranks(Echo).nothing(rows(1, 2))


def test_tensordicts_and_metadata_are_cut_too(ranks: Ranks) -> None:
    group = ranks(Echo)
    answer = group.proto(TensorDict({"x": torch.tensor([1, 2, 3, 4])}, [4]))
    assert isinstance(answer, TensorDict)
    assert answer["x"].tolist() == [1, 2, 3, 4]
    assert values(group.proto(BatchData(rows(1, 2)))) == [1, 2]
    assert [call[0] for call in (w.calls[-1] for w in group.workers)] == [[[1]], [[2]]]


def test_a_function_for_all_ranks(ranks: Ranks) -> None:
    def add(worker: Worker, data: DataProto, number: int) -> DataProto:
        assert data.batch is not None
        return DataProto.from_dict({"x": data.batch["x"] + number + 100 * worker.rank})

    group = ranks(Echo)
    answer = group.execute_with_func_generator(add, rows(1, 2, 3, 4), 10)
    assert values(answer) == [11, 12, 113, 114]
    assert group.execute_func_rank_zero(max, 3, 4) == 4
    assert group.execute_func_rank_zero(sum, [3, 4]) == 7
    with pytest.raises(ProtocolError, match="first argument must be a function, got DataProto"):
        group.execute_with_func_generator(rows(1, 2))


# ---- padding


def test_rows_that_do_not_divide_are_refused(ranks: Ranks) -> None:
    with pytest.raises(ProtocolError, match="3 rows do not make 2 equal chunks"):
        ranks(Echo).proto(rows(1, 2, 3))


def test_padding_is_sent_and_cut_off_again(ranks: Ranks) -> None:
    group = ranks(Echo, 4)
    data = rows(1, 2, 3, 4, 5, auto_padding=True)
    answer = group.proto(data, rows(5, 6, 7, 8, 9, auto_padding=True))
    sent = [worker.calls[0][0] for worker in group.workers]
    assert sent == [[[1, 2], [5, 6]], [[3, 4], [7, 8]], [[5, 5], [9, 9]], [[5, 5], [9, 9]]]
    assert "_padding_size_key_x123d" not in group.workers[0].calls[0][1]
    assert values(answer) == [1, 2, 3, 4, 5]
    assert values(data) == [1, 2, 3, 4, 5]


def test_padding_for_all_batches_of_the_process(ranks: Ranks) -> None:
    DataProtoConfig.auto_padding = True
    try:
        assert values(ranks(Echo).proto(rows(1, 2, 3))) == [1, 2, 3]
    finally:
        DataProtoConfig.auto_padding = None


def test_padding_leaves_answers_without_rows_alone(ranks: Ranks) -> None:
    answer = ranks(Echo).metrics_alone(rows(1, 2, 3, auto_padding=True))
    assert answer.meta_info["metrics"] == {"rows": [2, 2]}
    assert len(ranks(Echo).metric(rows(1, 2, 3, auto_padding=True))) == 2


def test_batches_that_would_be_padded_differently(ranks: Ranks) -> None:
    unlike = rows(1, auto_padding=True), rows(1, 2, 3, auto_padding=True)
    with pytest.raises(ProtocolError, match=r"batches of \[1, 3\] rows cannot be padded"):
        ranks(Echo).proto(*unlike)


# ---- futures


def test_a_call_that_does_not_block(ranks: Ranks) -> None:
    group = ranks(Echo)
    future = group.later(rows(1, 2, 3, auto_padding=True))
    assert isinstance(future, DataProtoFuture)
    assert values(future.get()) == [1, 2, 3]
    assert [answer.result() for answer in group.later_to_all()] == [0, 1]


def test_a_future_is_an_argument(ranks: Ranks) -> None:
    first, second = ranks(Echo), ranks(Echo)
    future = first.later(rows(1, 2, 3, auto_padding=True))
    assert values(second.proto(future)) == [1, 2, 3]
    assert [w.calls[0][0] for w in second.workers] == [[[1, 2]], [[3, 3]]]


def test_a_group_that_passes_futures_does_not_wait(ranks: Ranks) -> None:
    class Waiting(Worker):
        @register(Dispatch.DP_COMPUTE_PROTO)
        def work(self, data: DataProto) -> DataProto:
            return data

    waited = []

    def getter(futures: list[Any]) -> list[Any]:
        waited.append(len(futures))
        return futures

    group = ranks(Waiting)
    group.passes_futures = True
    future = DataProtoFuture.concat([rows(1, 2), rows(3, 4)], getter=getter)
    assert values(group.work(future)) == [1, 2, 3, 4]
    assert waited == [2, 2]  # by each worker, for the whole


# ---- meshes


class OnMesh(Worker):
    """Four ranks: two parts, each with two ranks that share it. The parts are not in order."""

    parts = (1, 1, 0, 0)
    collects = (False, True, True, False)

    def place(self, rank: int, world_size: int) -> None:
        super().place(rank, world_size)
        self._register_dispatch_collect_info("actor", self.parts[rank], self.collects[rank])

    @register(make_nd_compute_dataproto_dispatch_fn("actor"))
    def mark(self, data: DataProto, plus: int = 0) -> DataProto:
        self.got = values(data)
        ones = torch.ones(len(data), dtype=torch.long)
        assert data.batch is not None
        return DataProto.from_dict({"x": data.batch["x"] + plus, "rank": self.rank * ones})

    @register(make_nd_compute_dataproto_dispatch_fn("critic"))
    def elsewhere(self, data: DataProto) -> DataProto:
        return data


def test_ranks_of_a_mesh_share_their_rows(ranks: Ranks) -> None:
    group = ranks(OnMesh, 4)
    answer = group.mark(rows(1, 2, 3, 4), plus=10)
    assert [worker.got for worker in group.workers] == [[3, 4], [3, 4], [1, 2], [1, 2]]
    assert values(answer) == [11, 12, 13, 14]
    assert answer.batch["rank"].tolist() == [2, 2, 1, 1]
    group.log.clear()
    group.mark(rows(1, 2))
    assert [method for _, method in group.log] == ["mark"] * 4  # the mesh is asked for once


def test_padding_is_for_the_parts_of_a_mesh(ranks: Ranks) -> None:
    group = ranks(OnMesh, 4)
    assert values(group.mark(rows(1, 2, 3, auto_padding=True))) == [1, 2, 3]
    assert [worker.got for worker in group.workers] == [[3, 3], [3, 3], [1, 2], [1, 2]]


def test_a_mesh_that_nobody_registered(ranks: Ranks) -> None:
    with pytest.raises(ProtocolError, match=r"OnMesh has not .* 'critic' \(known: actor\)$"):
        ranks(OnMesh, 4).elsewhere(rows(1, 2))


@pytest.mark.parametrize("collects", [(True, True, True, False), (False, False, True, False)])
def test_every_part_is_collected_once(ranks: Ranks, collects: tuple[bool, ...]) -> None:
    class Wrong(OnMesh):
        pass

    Wrong.collects = collects  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match="each part must be collected once"):
        ranks(Wrong, 4).mark(rows(1, 2))
