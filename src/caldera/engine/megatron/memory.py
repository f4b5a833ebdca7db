"""Tensors that wait in host memory while others need the device.

Megatron keeps views of views of its parameters. They all stay valid, since it is the memory beneath
them that is given back and later taken again. It works on every device; on a CPU, which has one
memory, it moves numbers from one place in it to another and gains nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Parked:
    memory: torch.UntypedStorage
    size: int
    copy: Tensor | None


class Parking:
    """Memory of tensors that is away from the device."""

    def __init__(self) -> None:
        self._parked: list[_Parked] = []

    def park(self, tensors: Iterable[Tensor], keeps: bool = True) -> None:
        """Give the memory back, until it is fetched. Its contents wait on the host, unless they are
        not to be kept: then they come back as zeros."""
        if self._parked:
            return
        seen: set[int] = set()
        for tensor in tensors:
            memory = tensor.untyped_storage()
            if memory.nbytes() and memory.data_ptr() not in seen:
                seen.add(memory.data_ptr())
                copy = _on_host(memory) if keeps else None
                self._parked.append(_Parked(memory, memory.nbytes(), copy))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies have to be complete before their source is gone
        for one in self._parked:
            one.memory.resize_(0)

    def fetch(self) -> None:
        """Bring everything back to where it was."""
        for one in self._parked:
            one.memory.resize_(one.size)
            there = _bytes(one.memory)
            if one.copy is None:
                there.zero_()
            else:
                there.copy_(one.copy, non_blocking=True)
        self._parked = []


def _bytes(memory: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def _on_host(memory: torch.UntypedStorage) -> Tensor:
    there = _bytes(memory)
    copy = torch.empty_like(there, device="cpu", pin_memory=there.is_cuda)
    return copy.copy_(there, non_blocking=True)
