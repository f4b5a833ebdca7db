"""DataProto: what travels between rooms.

A `DataProto` is a table with three parts: `batch` (tensors), `non_tensor_batch` (numpy arrays,
mostly of objects) and `meta_info` (facts about the whole batch). The first dimension of every
tensor and array is the row.
"""

from __future__ import annotations

from caldera.protocol.dataproto import DataProto, DataProtoItem
from caldera.protocol.functions import (
    all_gather_data_proto,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    tensors_of,
    unfold_batch_dim,
    unpad_dataproto,
)
from caldera.protocol.future import BatchData, DataProtoFuture
from caldera.protocol.merging import (
    list_of_dict_to_dict_of_list,
    union_numpy_dict,
    union_tensor_dict,
)
from caldera.protocol.serialization import (
    DataProtoConfig,
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)

__all__ = [
    "BatchData",
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "all_gather_data_proto",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "serialize_single_tensor",
    "serialize_tensordict",
    "tensors_of",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]
