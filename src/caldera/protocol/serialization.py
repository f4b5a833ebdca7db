"""The tensors of a DataProto as bytes.

Two formats: one `torch.save` of the consolidated batch, or one numpy buffer for each tensor, which
pickle protocol 5 can hand over without a copy. Either way the tensors arrive on the CPU, because
the receiving process may not have the sender's devices.
"""

from __future__ import annotations

import io
import os
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from caldera.errors import ConfigError, ProtocolError
from caldera.protocol.inputs import entries

# ---- The process-wide settings of DataProto, read from the environment when they are used

AUTO_PADDING_VARIABLE = "VERL_AUTO_PADDING"
SERIALIZATION_VARIABLE = "VERL_DATAPROTO_SERIALIZATION_METHOD"
SERIALIZATION_METHODS = ("torch", "numpy")


class _AutoPaddingSwitch(type):
    """Makes `DataProtoConfig.auto_padding` a property of the class itself."""

    _override: bool | None = None

    @property
    def auto_padding(cls) -> bool:
        if cls._override is not None:
            return cls._override
        return os.environ.get(AUTO_PADDING_VARIABLE, "").upper() in ("TRUE", "1")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool | None) -> None:
        cls._override = enabled


class DataProtoConfig(metaclass=_AutoPaddingSwitch):
    """Settings that hold for every DataProto of the process.

    `DataProtoConfig.auto_padding` says whether a batch that does not divide evenly may be padded.
    It follows `VERL_AUTO_PADDING` until it is assigned; assigning None follows the variable again.
    """

    auto_padding_key = "_verl_auto_padding"
    """The `meta_info` flag that enables auto padding for one DataProto."""


def serialization_method() -> str:
    """How a pickled DataProto writes its tensors: "torch" (the default) or "numpy"."""
    method = os.environ.get(SERIALIZATION_VARIABLE) or "torch"
    if method not in SERIALIZATION_METHODS:
        raise ConfigError(
            f"{SERIALIZATION_VARIABLE}={method!r} is not a serialization method "
            f"(known: {', '.join(SERIALIZATION_METHODS)})"
        )
    return method


SerializedTensor: TypeAlias = tuple[str, tuple[int, ...], NDArray[np.uint8]]
"""dtype name, shape, raw bytes"""
SerializedTensorDict: TypeAlias = tuple[tuple[int, ...], dict[str, Any]]
"""batch size, and by key a SerializedTensor or, for a nested TensorDict, a SerializedTensorDict"""
SerializedBatch: TypeAlias = bytes | SerializedTensorDict


def serialize_single_tensor(tensor: torch.Tensor) -> SerializedTensor:
    """A tensor of any dtype and device as (dtype name, shape, raw bytes)."""
    if tensor.layout != torch.strided:
        raise ProtocolError(
            f"serialize_single_tensor: a tensor of layout {tensor.layout} has no numpy form; "
            "use the torch serialization method"
        )
    flat = tensor.detach().cpu().contiguous().flatten()
    if flat.numel() < 2:  # contiguous with any stride, while only a stride of 1 can be viewed
        flat = flat.clone(memory_format=torch.contiguous_format)
    # Bytes, not numbers: numpy has no bfloat16.
    return str(tensor.dtype), tuple(tensor.shape), flat.view(torch.uint8).numpy()


def deserialize_single_tensor(serialized: SerializedTensor) -> torch.Tensor:
    """The inverse of `serialize_single_tensor`, on the CPU; it shares memory where it may."""
    dtype_name, shape, raw = serialized
    dtype = getattr(torch, dtype_name.removeprefix("torch."))
    if raw.size == 0:  # no bytes cannot be viewed as another dtype
        return torch.empty(shape, dtype=dtype)
    writable = raw if raw.flags.writeable else raw.copy()
    return torch.from_numpy(writable).view(dtype).reshape(shape)


def serialize_tensordict(batch: TensorDictBase) -> SerializedTensorDict:
    """A TensorDict as (batch size, serialized entries)."""
    return tuple(batch.batch_size), {
        key: _serialize_entry(key, value) for key, value in entries(batch).items()
    }


def deserialize_tensordict(serialized: SerializedTensorDict) -> TensorDict:
    """The inverse of `serialize_tensordict`."""
    batch_size, entries = serialized
    tensors = {key: _deserialize_entry(entry) for key, entry in entries.items()}
    return TensorDict(tensors, batch_size=list(batch_size))


def serialize_batch(batch: TensorDict | None) -> SerializedBatch | None:
    """The batch in the format that the environment asks for."""
    if batch is None:
        return None
    if serialization_method() == "numpy":
        return serialize_tensordict(batch)
    buffer = io.BytesIO()
    # Consolidated, because torch.save would write the whole storage behind a slice.
    torch.save(batch.detach().to("cpu").consolidate(), buffer)
    return buffer.getvalue()


def deserialize_batch(serialized: SerializedBatch | None) -> TensorDict | None:
    """The inverse of `serialize_batch`; the format is read from the data, not the environment."""
    if serialized is None:
        return None
    if not isinstance(serialized, bytes):
        return deserialize_tensordict(serialized)
    batch = torch.load(io.BytesIO(serialized), map_location="cpu", weights_only=False)
    return cast(TensorDict, batch.clear_device_())


def _serialize_entry(key: str, value: object) -> SerializedTensor | SerializedTensorDict:
    if isinstance(value, TensorDictBase):
        return serialize_tensordict(value)
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return serialize_single_tensor(value)
    kind = f"{type(value).__name__} of layout {getattr(value, 'layout', None)}"
    raise ProtocolError(
        f"serialize_tensordict: {key!r} is a {kind}, which has no numpy form; "
        "use the torch serialization method"
    )


def _deserialize_entry(entry: Any) -> torch.Tensor | TensorDict:
    if len(entry) == 2:
        return deserialize_tensordict(entry)
    return deserialize_single_tensor(entry)
