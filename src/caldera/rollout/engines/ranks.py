"""One engine over the devices of several ranks: the first of them runs it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from caldera.config.rollout_checks import check_sampling_ranks

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class EngineRanks:
    """Consecutive ranks of the run, on one node, whose devices one engine uses."""

    def __init__(self, members: list[int], group: dist.ProcessGroup, device: torch.device) -> None:
        """To be made by every member at once; `group` is of the hosts."""
        self._group = group
        self.leads = dist.get_rank() == members[0]
        """Whether the engine is this rank's."""
        found: list[str | None] = [None] * len(members)
        dist.all_gather_object(found, _device_name(device), group)
        self.devices = [name for name in found if name is not None]
        """The GPUs of all members, as CUDA_VISIBLE_DEVICES names them; none on CPUs."""

    @classmethod
    def join(cls, size: int, device: torch.device) -> EngineRanks | None:
        """The ranks that this one shares an engine with; None: its engine is its own.

        Every rank of the run must come here. A run of one rank shares nothing: its engine has the
        devices that the process sees.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if size == 1 or ranks == 1:
            return None
        check_sampling_ranks(size, ranks)
        found: EngineRanks | None = None
        for start in range(0, ranks, size):
            members = list(range(start, start + size))
            group = dist.new_group(members, backend="gloo")
            if dist.get_rank() in members:
                found = cls(members, group, device)
        return found

    def wait(self) -> None:
        """Return once every member has come here."""
        dist.barrier(self._group)


def _device_name(device: torch.device) -> str | None:
    """Of a GPU, as a process that sees others would have to name it."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    visible = os.environ.get(VISIBLE_DEVICES)
    return visible.split(",")[index].strip() if visible else str(index)
