"""The native sampler over several ranks, each with its part of every layer and of the cache."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from caldera.config import RolloutConfig
from caldera.errors import RolloutError, UnsupportedError
from caldera.rollout.native.cache import KVCache
from caldera.rollout.native.engine import NativeRollout
from caldera.rollout.native.parallel.sharding import KEY, shard_module
from caldera.rollout.native.parallel.team import Message, Order, Team, packed, unpacked
from caldera.rollout.native.steps import InFlightStep, Step


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
        self._team.send(Order.STEP, packed(step))
        try:
            self._share_newest(step)
            return super()._launch(step, cache)
        except RuntimeError:  # such as a sum that not all have come to
            self._team.raise_notes()
            raise

    def _most_pages(self) -> int:
        if self.config.kv_cache_blocks is not None:
            return self.config.kv_cache_blocks
        self._team.send(Order.MEASURE, np.array([self.cache_bytes > 0], dtype=np.int32))
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
        self._team.send(Order.ALLOCATE, np.array([cache.pages, is_new], dtype=np.int32))
        return cache

    def _obey(self, order: Order, payload: Message) -> bool:
        """Whether there is more to come."""
        if order is Order.STEP:
            assert self._cache is not None, "it is allocated before"
            step = unpacked(payload)
            self._share_newest(step)
            self._runner.run(step, self._cache, None)
        elif order is Order.MEASURE:
            if not payload[0]:
                self._cache = None
            self._measured()
        elif order is Order.ALLOCATE:
            self._allocate(int(payload[0]), bool(payload[1]))
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
