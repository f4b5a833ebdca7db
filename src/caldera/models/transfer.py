"""Handing tensors to a device without waiting for what it is doing."""

from __future__ import annotations

import torch
from torch import Tensor

from caldera.protocol import DataProto, tensors_of


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device; the copy is queued behind the device's work, nobody waits."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def send_rows(rows: DataProto, device: torch.device) -> DataProto:
    """The tensors of rows on the device, sent in the same way."""
    if device.type == "cpu":
        return rows
    tensors = {
        key: send(value, device)
        for key, value in tensors_of(rows).items()
        if isinstance(value, Tensor)
    }
    return DataProto.from_dict(tensors, rows.non_tensor_batch, rows.meta_info)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device. What leaves a GPU goes to pinned memory, from which it comes back
    many times as fast; before it is read there, somebody has to wait for the GPU."""
    if device.type != "cpu" or not tensor.is_cuda or type(tensor) is not Tensor:
        return tensor.to(device, non_blocking=True)
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
