"""Functions of whole DataProtos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from caldera.errors import ProtocolError
from caldera.protocol import merging
from caldera.protocol.dataproto import DataProto, DataProtoItem
from caldera.protocol.inputs import common_leading_shape, entries, object_column


def tensors_of(data: DataProto) -> TensorDict:
    """The tensors of data that must have some."""
    if data.batch is None:
        raise ProtocolError("tensors_of: the data holds no tensors")
    return data.batch


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows, cycling from the first, until `size_divisor` divides; also how many."""
    if size_divisor < 1:
        raise ProtocolError(f"pad_dataproto_to_divisor: size_divisor={size_divisor} < 1")
    length = len(data)
    pad_size = -length % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(torch.arange(length + pad_size) % length), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Without its last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise ProtocolError(f"unpad_dataproto: cannot take {pad_size} rows off {len(data)} rows")
    return data.slice(end=len(data) - pad_size) if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """(B, ...) -> (n, B / n, ...) for every tensor and column, with n = `new_batch_size`."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise ProtocolError(f"fold_batch_dim: {len(data)} rows do not fold into {new_batch_size}")
    leading = (new_batch_size, len(data) // new_batch_size)
    return _with_leading_shape(data, leading, folded_dims=1)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """(n, m, ...) -> (n * m, ...) for every tensor and column; the inverse of folding."""
    if batch_dims < 1:
        raise ProtocolError(f"unfold_batch_dim: batch_dims={batch_dims} < 1")
    parts = {**entries(data.batch), **data.non_tensor_batch}
    leading = common_leading_shape("unfold_batch_dim", "data", parts, batch_dims)
    rows = len(data) if leading is None else int(np.prod(leading))
    return _with_leading_shape(data, (rows,), folded_dims=batch_dims)


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """Stack rows into a DataProto; non-tensors become object columns, meta_info must agree."""
    if not items:
        raise ProtocolError("collate_fn: there are no rows to stack")
    batches = [item.batch for item in items if item.batch is not None]
    if batches and len(batches) < len(items):
        raise ProtocolError(f"collate_fn: only {len(batches)} of {len(items)} rows have tensors")
    if batches:
        merging.require_same_keys("collate_fn", "row", [entries(batch) for batch in batches])
    values = merging.list_of_dict_to_dict_of_list([item.non_tensor_batch for item in items])
    meta: dict[str, Any] = {}
    for item in items:
        meta = merging.union_dict(meta, item.meta_info, "collate_fn", "meta_info")
    return DataProto(
        cast(TensorDict, TensorDict.stack(batches)) if batches else None,
        {key: object_column(column) for key, column in values.items()},
        meta,
    )


def all_gather_data_proto(data: DataProto, group: dist.ProcessGroup | None = None) -> None:
    """Replace the rows, in place, by those of all ranks of the group, in rank order.

    Ranks may have different numbers of rows. Every rank keeps its own meta_info.
    """
    own = DataProto(data.batch, data.non_tensor_batch)
    _layout(data.batch)  # which refuses what is no tensor, before any rank waits for it
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, own, group=group)
    for rank, part in enumerate(parts):
        if (found := _layout(part.batch)) != (first := _layout(parts[0].batch)):
            raise ProtocolError(
                f"all_gather_data_proto: the batch of rank {rank} holds {found}, "
                f"that of rank 0 {first}"
            )
    whole = DataProto.concat(parts)
    if data.batch is not None:
        devices = {key: tensor.device for key, tensor in entries(data.batch).items()}
        tensors = {key: t.to(devices[key]) for key, t in entries(whole.batch).items()}
        data.batch = TensorDict(tensors, batch_size=[len(whole)])
    data.non_tensor_batch = whole.non_tensor_batch


def _layout(batch: TensorDict | None) -> dict[str, str] | None:
    """The dtype and the shape of one row, by key."""
    if batch is None:
        return None
    for key, value in entries(batch).items():
        if not isinstance(value, torch.Tensor):
            raise ProtocolError(
                f"all_gather_data_proto: batch[{key!r}] is a {type(value).__name__}, not a tensor"
            )
    return {key: f"{t.dtype} {tuple(t.shape[1:])}" for key, t in entries(batch).items()}


def _with_leading_shape(data: DataProto, leading: tuple[int, ...], folded_dims: int) -> DataProto:
    """Replace the first `folded_dims` dimensions of every tensor and column by `leading`."""
    batch = None
    if data.batch is not None:
        tensors = {
            key: tensor.reshape(*leading, *tensor.shape[folded_dims:])
            for key, tensor in entries(data.batch).items()
        }
        batch = TensorDict(tensors, batch_size=leading[:1])
    columns = {
        key: column.reshape(*leading, *column.shape[folded_dims:])
        for key, column in data.non_tensor_batch.items()
    }
    return DataProto(batch, columns, dict(data.meta_info))
