"""The native sampler over several ranks, each with its part of every layer and of the cache."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from caldera.config import RolloutConfig
from caldera.config.samplers import check_sampling_ranks
from caldera.errors import RolloutError, UnsupportedError
from caldera.rollout.native.cache import KVCache
from caldera.rollout.native.engine import NativeRollout
from caldera.rollout.native.parallel.sharding import KEY, shard_module
from caldera.rollout.native.steps import InFlightStep, Step

# ---- The ranks that sample together, and the orders of the first of them

FOREVER = timedelta(days=365)
"""The others wait while the first has nothing to run, as during tool calls; its end ends it."""
FIRST_PART = 8192
"""Bytes that are sent at once: most messages have no second part."""
LENGTH_BYTES = 8
NOTE_BYTES = 2048
TO_REPORT = timedelta(seconds=10)
"""How long an error waits to be heard by others, who may be in no state to hear it."""
ORDERS, NOTES = 0, 1  # tags of messages


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
        timeout = timedelta(seconds=timeout_s)
        group, _ = dist.new_subgroups(size, timeout=timeout)
        control, _ = dist.new_subgroups(size, timeout=FOREVER, backend="gloo")
        return cls(dist.get_process_group_ranks(group), group, control, timeout)

    # ---- the leader

    def send(self, order: Order, *payload: Any) -> None:
        """Send the followers an order; returns before they have received it, but not before they
        have received the last one."""
        self._finish_sending()
        self._sent = [
            (dist.isend(part, rank, self._control, ORDERS), part)
            for part in in_parts(order, payload)
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
            (part,) = in_parts(Order.FAIL, ())
            with suppress(RuntimeError):  # it may be gone
                work = dist.isend(part, rank, self._control, ORDERS)
                if work is not None:
                    work.wait(TO_REPORT)

    # ---- a follower

    def receive(self) -> tuple[Order, tuple[Any, ...]]:
        """The next order, and what comes with it."""
        message = torch.empty(FIRST_PART, dtype=torch.uint8)
        dist.recv(message, self._leader, self._control, ORDERS)
        if (missing := _end_of(message) - FIRST_PART) > 0:
            rest = torch.empty(missing, dtype=torch.uint8)
            dist.recv(rest, self._leader, self._control, ORDERS)
            message = torch.cat([message, rest])
        return read_parts(message)

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


def in_parts(order: Order, payload: tuple[Any, ...]) -> list[Tensor]:
    """A message as it is sent: its length and its beginning, and perhaps the rest."""
    body = pickle.dumps((order, payload))
    message = bytearray(len(body).to_bytes(LENGTH_BYTES, "little") + body)
    message += bytes(max(0, FIRST_PART - len(message)))
    first, rest = torch.frombuffer(message, dtype=torch.uint8).tensor_split([FIRST_PART])
    return [first, rest] if len(rest) else [first]


def read_parts(message: Tensor) -> tuple[Order, tuple[Any, ...]]:
    """What was sent in these parts, one behind the other."""
    body = message[LENGTH_BYTES : _end_of(message)].numpy().tobytes()
    found: tuple[Order, tuple[Any, ...]] = pickle.loads(body)
    return found


def _end_of(message: Tensor) -> int:
    return LENGTH_BYTES + int.from_bytes(bytes(message[:LENGTH_BYTES].numpy()), "little")


# ---- The sampler of one of them


class TensorParallelRollout(NativeRollout):
    """One of the ranks that sample together.

    The first is asked for samples, and does all but the forward passes alone: it orders the others
    to run them. They `follow` until it has left `leading`. All of them sleep, wake up and load
    weights, which each takes its part of as whole ones pass by.
    """

    def __init__(
        self, config: RolloutConfig, module: nn.Module, device: torch.device, team: Team
    ) -> None:
        """`module` is on the meta device, and becomes this rank's part; `load_weights` fills it."""
        self._team = team
        self._check_capture(config, device)
        self._shard = shard_module(module, team.group, device)
        super().__init__(config, module, device)
        self.leads = team.leads

    @classmethod
    def join(
        cls, config: RolloutConfig, module: nn.Module, device: torch.device, timeout_s: float
    ) -> TensorParallelRollout:
        """This rank's sampler; every rank of the run must come here."""
        return cls(config, module, device, Team.join(config.tensor_model_parallel_size, timeout_s))

    def leading(self) -> AbstractContextManager[None]:
        """To be entered around all sampling of a phase; then the others are let go."""
        return self._team.leading()

    def follow(self) -> None:
        """Do what the first rank orders, until it is done."""
        try:
            with self.stepping():
                self._scheduler.version, self._stale = self.version, False
                while self._obey(*self._team.receive()):
                    pass
        except BaseException as error:
            self._team.report(error)
            raise

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().load_weights(self._shard.parts(stream), version)

    # ---- what the first orders, and the others do

    def _launch(self, step: Step, cache: KVCache) -> InFlightStep:
        self._team.send(Order.STEP, step)
        try:
            self._share_newest(step)
            return super()._launch(step, cache)
        except RuntimeError:  # such as a sum that not all have come to
            self._team.raise_notes()
            raise

    def _most_pages(self) -> int:
        if self.config.kv_cache_blocks is not None:
            return self.config.kv_cache_blocks
        self._team.send(Order.MEASURE, self.cache_bytes > 0)
        return self._measured()

    def _measured(self) -> int:
        """Pages that the cache of every rank could have."""
        try:
            own = super()._most_pages()
        except RolloutError:
            self._team.least(0)  # which the others wait for
            raise
        return self._team.least(own)

    def _enlarge_cache(self, useful: int) -> KVCache:
        cache = super()._enlarge_cache(useful)
        is_new = cache is not self._cache
        self._team.send(Order.ALLOCATE, cache.pages, is_new)
        return cache

    def _obey(self, order: Order, payload: tuple[Any, ...]) -> bool:
        """Whether there is more to come."""
        if order is Order.STEP:
            assert self._cache is not None, "it is allocated before"
            (step,) = payload
            self._share_newest(step)
            self._runner.run(step, self._cache, None)
        elif order is Order.MEASURE:
            if not payload[0]:
                self._cache = None
            self._measured()
        elif order is Order.ALLOCATE:
            self._allocate(*payload)
        elif order is Order.FAIL:
            self._reset()
        return order not in (Order.END, Order.FAIL)

    def _allocate(self, pages: int, is_new: bool) -> None:
        if is_new:
            self._cache = None  # before the next one is allocated
        if self._cache is None:
            self._cache = KVCache(self._cache_shape, pages, self.device)
        elif pages > self._cache.pages:
            self._cache.grow(pages)

    def _share_newest(self, step: Step) -> None:
        """Tokens that are still being sampled, as the first rank alone does."""
        if (step.token_ids < 0).any():
            self._team.take_over(self._runner.newest)

    def _check_capture(self, config: RolloutConfig, device: torch.device) -> None:
        backends = dist.get_backend_config(self._team.group)
        if device.type == "cuda" and not config.enforce_eager and "cuda:nccl" not in backends:
            raise UnsupportedError(
                f"{KEY}={self._team.size} on CUDA over {backends}: CUDA graphs take "
                "cuda:nccl; set actor_rollout_ref.rollout.enforce_eager=True"
            )
