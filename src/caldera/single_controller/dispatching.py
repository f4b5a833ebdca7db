"""What the dispatch modes do: split the arguments of a call among the ranks, and join the results.

| mode | each rank gets | the call returns |
|---|---|---|
| ONE_TO_ALL | every argument | the list of all results |
| RANK_ZERO | every argument | the result of rank 0 |
| ALL_TO_ALL | its element, if all arguments are lists with one for each rank; else all | the list |
| DP_COMPUTE | its element: every argument must be a list with one for each rank | the list |
| DP_COMPUTE_PROTO | its rows of each DataProto, and whatever is none | the rows of all |
| DP_COMPUTE_PROTO_WITH_FUNC | the same, after a function | the rows of all |
| DP_COMPUTE_METRIC | the same as DP_COMPUTE_PROTO | the list |
| DIRECT_ROLLOUT_METHOD | | an error: the method is not for calls through the group |

A batch that does not divide is refused, unless it has auto padding: then copies of its last row
are sent too, and as many rows are cut off the end of the result.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from tensordict import TensorDict

from caldera.errors import ProtocolError
from caldera.protocol import (
    BatchData,
    DataProto,
    DataProtoFuture,
    tensors_of,
    unpad_dataproto,
)
from caldera.protocol.balance import balance_partitions, log_seqlen_unbalance
from caldera.single_controller.decorator import Arguments, Dispatch, update_dispatch_mode

if TYPE_CHECKING:
    from caldera.single_controller.worker_group import WorkerGroup as Group

PADDING_KEY = "_padding_size_key_x123d"
"""The keyword with which a dispatch function tells how many rows it appended."""

Dispatched: TypeAlias = tuple[tuple[list[Any], ...], dict[str, Any]]


class Pending(ABC):
    """Stands for a rank's result that is still being computed."""

    @abstractmethod
    def result(self) -> Any:
        """Wait for the result."""


# ---- dispatching


def dispatch_one_to_all(group: Group, *args: Any, **kwargs: Any) -> Dispatched:
    ranks = group.world_size
    return tuple([v] * ranks for v in args), {name: [v] * ranks for name, v in kwargs.items()}


def dispatch_as_is(group: Group, *args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


def dispatch_lists(group: Group, *args: Any, **kwargs: Any) -> Dispatched:
    for name, value in [*enumerate(args), *kwargs.items()]:
        if not isinstance(value, list) or len(value) != group.world_size:
            given = f"{len(value)} values" if isinstance(value, list) else type(value).__name__
            raise ProtocolError(
                f"argument {name}: DP_COMPUTE takes a list with one value for each of the "
                f"{group.world_size} ranks, got {given}"
            )
    return args, kwargs


def dispatch_rows(group: Group, *args: Any, **kwargs: Any) -> Dispatched:
    return split_rows(range(group.world_size), args, kwargs)


def dispatch_rows_after_function(group: Group, *args: Any, **kwargs: Any) -> Dispatched:
    if not args or not callable(args[0]):
        given = type(args[0]).__name__ if args else "nothing"
        raise ProtocolError(f"the first argument must be a function, got {given}")
    rows, named = dispatch_rows(group, *args[1:], **kwargs)
    return ([args[0]] * group.world_size, *rows), named


def refuse_direct_call(group: Group, *args: Any, **kwargs: Any) -> Dispatched:
    raise ProtocolError("this method is for the rollout's own calls, not for calls of the group")


def split_rows(parts: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Dispatched:
    """Cut what has rows into max(parts) + 1 equal parts; rank r gets part number parts[r].

    Other values go to every rank. `PADDING_KEY` is among the keywords if rows were appended.
    """
    count = max(parts) + 1
    padded, pad_size = _padded([*args, *kwargs.values()], count)

    def share(value: Any) -> list[Any]:
        if not isinstance(value, DataProto | DataProtoFuture | TensorDict | BatchData):
            return [value] * len(parts)
        cut = BatchData(value).chunk(count) if isinstance(value, TensorDict) else value.chunk(count)
        return [cut[part] for part in parts]

    shares = [share(value) for value in padded]
    named: dict[str, Any] = dict(zip(kwargs, shares[len(args) :], strict=True))
    if pad_size:
        named[PADDING_KEY] = pad_size
    return tuple(shares[: len(args)]), named


def _padded(values: Sequence[Any], divisor: int) -> tuple[list[Any], int]:
    """The values, where a DataProto with auto padding has rows that divide; how many were added."""
    padding = [v for v in values if isinstance(v, DataProto) and v.is_padding_enabled()]
    lengths = sorted({len(data) for data in padding})
    if all(length % divisor == 0 for length in lengths):
        return list(values), 0
    if len(lengths) > 1:
        raise ProtocolError(
            f"batches of {lengths} rows cannot be padded for {divisor} parts in one call: "
            "the result could not be cut back"
        )
    pad_size = -lengths[0] % divisor

    def padded(value: Any) -> Any:
        if not any(value is data for data in padding):
            return value
        longer = copy.copy(value)  # shares memory: the caller's batch stays as it is
        longer.padding(pad_size)
        return longer

    return [padded(value) for value in values], pad_size


# ---- collecting


def collect_all(group: Group, results: list[Any]) -> list[Any]:
    return results


def collect_rank_zero(group: Group, results: list[Any]) -> Any:
    return results[0]


def collect_rows(group: Group, results: list[Any]) -> Any:
    """The rows of all results, or a future of them."""
    if isinstance(results[0], Pending):
        return DataProtoFuture.concat(results, getter=group.getter)
    return BatchData.concat(results)


def without_padding(result: Any, pad_size: int) -> Any:
    """The result without the rows that came of padding; a result without rows is left alone."""
    if not pad_size:
        return result
    if isinstance(result, DataProtoFuture):
        return result.then(partial(without_padding, pad_size=pad_size))
    if isinstance(result, DataProto) and len(result):
        return unpad_dataproto(result, pad_size)
    return result


# ---- meshes


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Any]:
    """A mode for workers that share their rows with peers, such as those of tensor parallelism.

    Each worker says with `_register_dispatch_collect_info` which part of a batch it takes, and
    whether its result is the one to collect.
    """

    def dispatch(group: Group, *args: Any, **kwargs: Any) -> Dispatched:
        parts = group.dispatch_info(mesh_name)
        wanted = group.collect_info(mesh_name)
        collected = [part for part, is_wanted in zip(parts, wanted, strict=True) if is_wanted]
        if sorted(collected) != list(range(max(parts) + 1)):
            raise ProtocolError(
                f"mesh {mesh_name!r}: the ranks take the parts {parts} of a batch and collect "
                f"{collected}; each part must be collected once"
            )
        return split_rows(parts, args, kwargs)

    def collect(group: Group, results: list[Any]) -> Any:
        found = zip(
            group.dispatch_info(mesh_name), group.collect_info(mesh_name), results, strict=True
        )
        by_part = {part: result for part, is_wanted, result in found if is_wanted}
        return collect_rows(group, [by_part[part] for part in sorted(by_part)])

    return {"dispatch_fn": dispatch, "collect_fn": collect, "mesh_name": mesh_name}


for _mode, _dispatch_fn, _collect_fn in (
    (Dispatch.RANK_ZERO, dispatch_one_to_all, collect_rank_zero),
    (Dispatch.ONE_TO_ALL, dispatch_one_to_all, collect_all),
    (Dispatch.ALL_TO_ALL, dispatch_as_is, collect_all),
    (Dispatch.DP_COMPUTE, dispatch_lists, collect_all),
    (Dispatch.DP_COMPUTE_PROTO, dispatch_rows, collect_rows),
    (Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, dispatch_rows_after_function, collect_rows),
    (Dispatch.DP_COMPUTE_METRIC, dispatch_rows, collect_all),
    (Dispatch.DIRECT_ROLLOUT_METHOD, refuse_direct_call, collect_all),
):
    update_dispatch_mode(_mode, _dispatch_fn, _collect_fn)


# ---- Load-balanced dispatch: the rows of a batch are spread over the ranks by sequence length
#
# The controller's batch keeps its order: rows are put into the order of the ranks on their way out,
# and outputs back into the order of the batch. For an update, rows are spread within each mini-
# batch, so that a mini-batch has the same members for any number of ranks, and the numbers of a run
# do not depend on it.


@dataclass(frozen=True)
class Balancing:
    """How a group spreads the rows of a batch. Without it, rows must fill the ranks as they are."""

    by_length: bool = True
    """All ranks get the same work; false: equal shares, in the order of the batch."""
    mini_batch_size: int | None = None
    """Rows of an optimiser step, for methods that are registered with `in_mini_batches`."""
    rows_together: int = 1
    """Consecutive rows that go to the same rank, side by side, such as the pairs of DPO."""

    def partition(
        self, lengths: list[int], ranks: int, in_mini_batches: bool = False
    ) -> list[list[int]]:
        """The rows of each rank, in the order in which it takes them; lengths are in tokens."""
        size = (self.mini_batch_size if in_mini_batches else None) or len(lengths)
        parts: list[list[int]] = [[] for _ in range(ranks)]
        for start in range(0, len(lengths), size):
            shares = self._shares(lengths[start : start + size], ranks)
            for part, rows in zip(parts, shares, strict=True):
                part += [start + row for row in rows]
        return parts

    def spread(self, data: DataProto, ranks: int, in_mini_batches: bool) -> SpreadRows:
        """Which row goes where. Where they do not fill the ranks, the first ones go out twice."""
        lengths = _lengths(data)
        padding = -len(lengths) % (ranks * self.rows_together)
        filled = [lengths[row % len(lengths)] for row in range(len(lengths) + padding)]
        parts = self.partition(filled, ranks, in_mini_batches)
        return SpreadRows(torch.tensor([row for part in parts for row in part]), padding)

    def metrics(self, data: DataProto, ranks: int) -> dict[str, float]:
        """How unequal the work of the ranks is as the rows come, and as they are spread."""
        lengths = _lengths(data)
        return log_seqlen_unbalance(lengths, self.partition(lengths, ranks))

    def _shares(self, lengths: list[int], ranks: int) -> list[list[int]]:
        if self.by_length:
            return balance_partitions(lengths, ranks, self.rows_together)
        share = len(lengths) // ranks
        assert share % self.rows_together == 0, "the ranks are filled with whole groups of rows"
        return [list(range(rank * share, (rank + 1) * share)) for rank in range(ranks)]


@dataclass(frozen=True)
class SpreadRows:
    """The order in which the rows of one batch go to the ranks."""

    order: torch.Tensor
    """Positions in the batch with its padding, those of rank 0 first."""
    padding: int

    def send(self, data: DataProto) -> DataProto:
        """The rows in the order of the ranks."""
        return data.select_idxs(self.order % (len(self.order) - self.padding))

    def restore(self, output: Any) -> Any:
        """The output, or the future of one, in the order of the batch; without rows, as it is."""
        if isinstance(output, DataProtoFuture):
            return output.then(self.restore)
        if not isinstance(output, DataProto) or not len(output):
            return output
        return unpad_dataproto(output.select_idxs(torch.argsort(self.order)), self.padding)


def _lengths(batch: DataProto) -> list[int]:
    """Tokens of each row; rows without a mask count alike."""
    tensors = tensors_of(batch)
    if "attention_mask" not in tensors.keys():  # noqa: SIM118 (a TensorDict has no `in`)
        return [1] * len(batch)
    lengths: list[int] = tensors["attention_mask"].sum(-1).tolist()
    return lengths
