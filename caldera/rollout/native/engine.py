"""The sampler itself: schedule, run, sample, take in, until nothing waits or runs."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from caldera.errors import RolloutError
from caldera.models.forward import base_module
from caldera.rollout.base import (
    ROLLOUTS,
    Completion,
    OnFinished,
    Request,
    Rollout,
    RolloutPart,
)
from caldera.rollout.native.blocks import PAGE_SIZE, BlockManager, pages_for
from caldera.rollout.native.cache import CacheShape, KVCache, affordable_pages
from caldera.rollout.native.runner import Runner
from caldera.rollout.native.running import Running, Sequence
from caldera.rollout.native.sampler import sample
from caldera.rollout.native.scheduler import Scheduler
from caldera.rollout.precision import sampling_dtype, sampling_precision

if TYPE_CHECKING:
    from caldera.config import RolloutConfig

logger = logging.getLogger(__name__)


@ROLLOUTS.register("native")
class NativeRollout(Rollout):
    """Continuous batching over a paged cache, with the trainer's own module.

    A sample depends on its seed, prompt and parameters, not on what it is batched with (but for
    the rounding of floating-point sums).
    """

    def __init__(self, config: RolloutConfig, module: nn.Module, device: torch.device) -> None:
        super().__init__(config, module, device)
        self._dtype = sampling_dtype(module, config.dtype, device)
        self._cache_shape = CacheShape.of(base_module(module).config, self._dtype)
        self._runner = Runner(module, device)
        self._cache: KVCache | None = None
        self._awake = True
        self._raw_log_probs = config.logprobs_mode == "raw_logprobs"

    @property
    def cache_bytes(self) -> int:
        """Memory that the key/value cache holds now."""
        return self._cache.pages * self._cache_shape.page_bytes if self._cache else 0

    def wake_up(self, part: RolloutPart | None = None) -> None:
        """Let the cache be allocated again, which `generate` does for what its requests need.

        There is nothing to do for the weights: the module holds them.
        """
        if part != "weights":
            self._awake = True

    def sleep(self) -> None:
        """Free the cache."""
        self._awake = False
        self._cache = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def generate(
        self, requests: Many[Request], on_finished: OnFinished | None = None
    ) -> list[Completion]:
        if not requests:
            return []
        if not self._awake:
            raise RolloutError("the sampler sleeps: wake it up before generating")
        self.check_lengths(requests)
        precision = sampling_precision(self.module, self._dtype, self.device)
        with self.sampling_mode(), precision:
            return self._generate(_sequences(requests), on_finished)

    def _generate(
        self, sequences: list[Sequence], on_finished: OnFinished | None
    ) -> list[Completion]:
        cache = self._reserve_cache(sequences)
        rows = min(self.config.max_num_seqs, len(sequences))
        widest = max(pages_for(sequence.max_length) for sequence in sequences)
        running = Running(rows, sequences)
        blocks = BlockManager(cache.pages, rows, widest)
        scheduler = Scheduler(running, blocks, self.config.max_num_batched_tokens)
        scheduler.add(sequences)
        completions: dict[int, Completion] = {}
        while scheduler.has_work():
            step = scheduler.schedule()
            logits = self._runner.run(step, cache)
            tokens, log_probs = sample(logits, running.sampling(step.rows), self._raw_log_probs)
            for each in scheduler.update(step, *_to_host(tokens, log_probs)):
                done = Completion(each.token_ids, each.log_probs, each.finish_reason, self.version)
                completions[each.index] = done
                if on_finished is not None:
                    on_finished(each.index, done)
        if scheduler.preemptions:
            logger.info("%d sequences were evicted for want of cache", scheduler.preemptions)
        return [completions[index] for index in range(len(sequences))]

    def _reserve_cache(self, sequences: list[Sequence]) -> KVCache:
        """The cache, as large as these sequences could make use of and memory allows."""
        demands = [pages_for(sequence.max_length) for sequence in sequences]
        useful = sum(heapq.nlargest(self.config.max_num_seqs, demands))
        fixed = self.config.kv_cache_blocks
        if self._cache is None or (fixed is None and self._cache.pages < useful):
            self._cache = None  # before the next one is measured and allocated
            pages = fixed or min(useful, self._affordable_pages())
            self._check_pages(demands, pages)
            self._cache = KVCache(self._cache_shape, pages, self.device)
        self._check_pages(demands, self._cache.pages)
        return self._cache

    def _affordable_pages(self) -> int:
        utilization = self.config.gpu_memory_utilization
        return affordable_pages(self._cache_shape, self.device, utilization)

    def _check_pages(self, demands: list[int], pages: int) -> None:
        largest = max(demands)
        if largest > pages:
            raise RolloutError(
                f"request {demands.index(largest)} needs {largest} pages of {PAGE_SIZE} tokens, "
                f"the key/value cache has {pages}: set rollout.kv_cache_blocks or "
                "rollout.gpu_memory_utilization higher, or rollout.response_length lower"
            )


def _sequences(requests: Many[Request]) -> list[Sequence]:
    groups: dict[tuple[int, ...], int] = {}
    sequences = []
    for index, request in enumerate(requests):
        group = groups.setdefault(tuple(request.prompt_ids), len(groups))
        prompt = np.array(request.prompt_ids, dtype=np.int64)
        sequences.append(Sequence(index, request, prompt, group))
    return sequences


def _to_host(
    tokens: Tensor, log_probs: Tensor
) -> tuple[
    np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.float32]]
]:
    """Both in one transfer: float64 holds every token id exactly."""
    if tokens.device.type == "cpu":
        return tokens.numpy(), log_probs.numpy()
    both = torch.stack([tokens.double(), log_probs.double()]).cpu().numpy()
    return both[0].astype(np.int64), both[1].astype(np.float32)
