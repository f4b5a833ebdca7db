"""The ranks that sample together, and the orders of the first of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import timedelta
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from caldera.config.samplers import check_sampling_ranks
from caldera.errors import RolloutError
from caldera.rollout.native.steps import Decode, Prefill, Step

Message = NDArray[np.int32]

FOREVER = timedelta(days=365)
"""The others wait while the first has nothing to run, as during tool calls; its end ends it."""
FIRST_PART = 1024
"""Numbers that are sent at once: most messages have no second part."""
NOTE_BYTES = 2048
TO_REPORT = timedelta(seconds=10)
"""How long an error waits to be heard by others, who may be in no state to hear it."""
ORDERS, NOTES = 0, 1  # tags of messages
NOTHING: Message = np.empty(0, dtype=np.int32)


class Order(IntEnum):
    STEP = 0  # run this
    MEASURE = 1  # how many pages could the cache have? 0: you hold none now
    ALLOCATE = 2  # have a cache of so many pages; 1: an empty one
    END = 3  # nothing more is sampled
    FAIL = 4  # nor was all that was begun


class Team:
    """Consecutive ranks of the run. The first leads; the others do what it orders.

    An error of a follower is reported to the leader, which raises it when it gives the next order,
    or when the sum that it waits for fails.
    """

    def __init__(
        self,
        members: list[int],
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        timeout: timedelta,
    ) -> None:
        """`group` adds up; `control` is for orders and notes, on the host."""
        self.size = len(members)
        self.group = group
        self.leads = dist.get_rank() == members[0]
        self._leader, *self._followers = members
        self._control = control
        self._timeout = timeout
        self._sent: list[tuple[dist.Work | None, Tensor]] = []
        self._notes: dict[int, Tensor] = {}
        self._expected: list[dist.Work | None] = []
        for rank in self._followers if self.leads else ():
            # Where a note is to be laid down: it comes without anybody waiting for it.
            self._notes[rank] = torch.zeros(NOTE_BYTES, dtype=torch.uint8)
            self._expected.append(dist.irecv(self._notes[rank], rank, control, NOTES))

    @classmethod
    def join(cls, size: int, timeout_s: float) -> Team:
        """This rank's team; every rank of the run must come here."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        check_sampling_ranks(size, ranks)
        timeout, found = timedelta(seconds=timeout_s), None
        for start in range(0, ranks, size):
            members = list(range(start, start + size))
            group = dist.new_group(members, timeout=timeout)
            control = dist.new_group(members, timeout=FOREVER, backend="gloo")
            if dist.get_rank() in members:
                found = cls(members, group, control, timeout)
        assert found is not None, "teams are of all ranks"
        return found

    # ---- the leader

    def send(self, order: Order, payload: Message = NOTHING) -> None:
        """Send the followers an order; returns before they have received it, but not before they
        have received the last one."""
        self._finish_sending()
        first = np.zeros(FIRST_PART, dtype=np.int32)
        first[:2] = order, len(payload)
        begun = min(len(payload), FIRST_PART - 2)
        first[2 : 2 + begun] = payload[:begun]
        parts = [torch.from_numpy(part) for part in (first, payload[begun:]) if len(part)]
        self._sent = [
            (dist.isend(part, rank, self._control, ORDERS), part)
            for part in parts
            for rank in self._followers
        ]

    def _finish_sending(self) -> None:
        """Return once the followers have received the last order."""
        self.raise_notes()
        for work, _ in self._sent:
            if work is not None:
                work.wait(self._timeout)
        self._sent = []

    def raise_notes(self) -> None:
        """Raise what a follower has raised, if one has."""
        for rank, note in self._notes.items():
            if note[-1]:  # it is complete
                text = bytes(note[:-1].numpy()).rstrip(b"\0").decode(errors="replace")
                raise RolloutError(f"rank {rank}, which samples with this one, failed: {text}")

    @contextmanager
    def leading(self) -> Iterator[None]:
        """The followers are let go in the end, however that comes about."""
        try:
            yield
        except BaseException:
            self._let_go()
            raise
        self.send(Order.END)
        self._finish_sending()

    def _let_go(self) -> None:
        """Order the followers that still receive to fail."""
        for rank in self._followers:
            payload = torch.zeros(FIRST_PART, dtype=torch.int32)
            payload[0] = Order.FAIL
            with suppress(RuntimeError):  # it may be gone
                work = dist.isend(payload, rank, self._control, ORDERS)
                if work is not None:
                    work.wait(TO_REPORT)

    # ---- a follower

    def receive(self) -> tuple[Order, Message]:
        """The next order."""
        first = torch.empty(FIRST_PART, dtype=torch.int32)
        dist.recv(first, self._leader, self._control, ORDERS)
        order, length = first[:2].tolist()
        if length <= FIRST_PART - 2:
            return Order(order), first[2 : 2 + length].numpy()
        rest = torch.empty(length - (FIRST_PART - 2), dtype=torch.int32)
        dist.recv(rest, self._leader, self._control, ORDERS)
        return Order(order), torch.cat([first[2:], rest]).numpy()

    def report(self, error: BaseException) -> None:
        """Report an error to the leader, which reads it when it next looks."""
        text = f"{type(error).__name__}: {error}".encode()[: NOTE_BYTES - 1]
        payload = bytearray(text.ljust(NOTE_BYTES - 1, b"\0") + b"\1")
        note = torch.frombuffer(payload, dtype=torch.uint8)
        with suppress(RuntimeError):  # it may be gone
            work = dist.isend(note, self._leader, self._control, NOTES)
            if work is not None:
                work.wait(TO_REPORT)

    # ---- all

    def least(self, number: int) -> int:
        """The smallest of the members' numbers."""
        least = torch.tensor([number])
        dist.all_reduce(least, dist.ReduceOp.MIN, self.group)
        return int(least)

    def take_over(self, tensor: Tensor) -> None:
        """Give every member the leader's values."""
        dist.broadcast(tensor, self._leader, self.group)


# ---- steps as numbers

KINDS: tuple[type[Prefill] | type[Decode], ...] = (Prefill, Decode)
FLAT = -1


def packed(step: Step) -> Message:
    """A step as one array: its kind, the shape of each field, their values."""
    arrays = [np.asarray(getattr(step, field.name), dtype=np.int64) for field in fields(step)]
    shapes = [(len(array), array.shape[1] if array.ndim == 2 else FLAT) for array in arrays]
    head = [KINDS.index(type(step)), *(size for shape in shapes for size in shape)]
    return np.concatenate([head, *(array.ravel() for array in arrays)]).astype(np.int32)


def unpacked(message: Message) -> Step:
    """The step that was packed."""
    kind = KINDS[message[0]]
    names = [field.name for field in fields(kind)]
    start = 1 + 2 * len(names)
    shapes = message[1:start].reshape(-1, 2).tolist()
    values: dict[str, Any] = {}
    for name, (rows, columns) in zip(names, shapes, strict=True):
        size = rows if columns == FLAT else rows * columns
        array = message[start : start + size].astype(np.int64)
        values[name] = array if columns == FLAT else array.reshape(rows, columns)
        start += size
    step: Step = kind(**values)
    return step
