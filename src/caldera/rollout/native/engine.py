"""The sampler itself: schedule, run, sample, take in, until nothing waits or runs."""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn

from caldera.config.samplers import SAMPLERS
from caldera.errors import ConfigError, RolloutError, UnsupportedError
from caldera.models.exact import exactness, make_exact
from caldera.models.forward import adapters_in_use, base_module
from caldera.models.support import refuse_longer, refuse_other_models
from caldera.rollout.base import (
    ROLLOUTS,
    Completion,
    OnFinished,
    OnToken,
    Request,
    Rollout,
    RolloutPart,
    StepwiseRollout,
    TrainedPolicy,
)
from caldera.rollout.native.attention import to_device
from caldera.rollout.native.blocks import BlockManager, IntArray, pages_for
from caldera.rollout.native.cache import (
    CacheShape,
    KVCache,
    affordable_pages,
    give_back_memory,
    too_small,
)
from caldera.rollout.native.cpu.runner import PackedRunner
from caldera.rollout.native.cpu.weights import can_pack
from caldera.rollout.native.runner import Runner
from caldera.rollout.native.running import Running, Sequence
from caldera.rollout.native.sampler import sample
from caldera.rollout.native.scheduler import Scheduler
from caldera.rollout.native.steps import InFlightStep, Prefill, Step
from caldera.rollout.weights import sampling_dtype, sampling_precision

if TYPE_CHECKING:
    from collections.abc import Iterable

    from caldera.config import RolloutConfig

logger = logging.getLogger(__name__)


@ROLLOUTS.register("native")
class NativeRollout(StepwiseRollout):
    """Continuous batching over a paged cache, with the trainer's own module.

    A sample depends on its seed, prompt and parameters, not on what it is batched with (but for
    the rounding of floating-point sums, unless `native.exact`).
    """

    traits = SAMPLERS["native"]

    def __init__(self, config: RolloutConfig, module: nn.Module, device: torch.device) -> None:
        super().__init__(config, module, device)
        refuse_other_models(module)
        refuse_longer(module, config.longest_sequence, "actor_rollout_ref.rollout.max_model_len")
        self._vocabulary = len(cast(Tensor, base_module(module).get_input_embeddings().weight))
        self._dtype = sampling_dtype(module, config.dtype, device)
        ranks = config.tensor_model_parallel_size
        self._cache_shape = CacheShape.of(base_module(module).config, self._dtype, ranks)
        if config.native.exact:
            self._check_exact()
            make_exact(module)
        self._runner = self._make_runner()
        self._adapters = adapters_in_use(module)
        self._awake = True
        self._raw_log_probs = config.logprobs_mode == "raw_logprobs"
        self._reset()

    @classmethod
    def beside(cls, policy: TrainedPolicy, config: RolloutConfig, device: torch.device) -> Rollout:
        if config.tensor_model_parallel_size > 1:
            from caldera.rollout.native.parallel.engine import TensorParallelRollout

            empty = policy.shape(cls.dtype_of(policy, config))
            return TensorParallelRollout.join(config, empty, device, policy.timeout_s)
        if config.native.exact and not cls.shares(policy, config):
            raise ConfigError(
                "actor_rollout_ref.rollout.native.exact=True: sampler and trainer must share "
                "one module, but the actor is sharded, or actor_rollout_ref.rollout.dtype="
                f"{config.dtype} is not that of its parameters. Takes strategy=local, and the "
                "same precision"
            )
        return super().beside(policy, config, device)

    def _make_runner(self) -> Runner:
        config, device = self.config, self.device
        is_unchanged = config.enforce_eager or config.native.exact
        if device.type == "cpu" and not is_unchanged and can_pack(self.module, self._dtype):
            return PackedRunner(self.module, device, config.max_num_seqs, self._cache_shape)
        if device.type != "cuda" or config.enforce_eager:
            return Runner(self.module, device, config.max_num_seqs)
        from caldera.rollout.native.cuda.runner import CudaRunner

        return CudaRunner(self.module, device, config, self._cache_shape)

    def _reset(self) -> None:
        """Forget every request and everything that was computed."""
        config = self.config
        self._cache: KVCache | None = None
        self._blocks = BlockManager(0, config.max_num_seqs)
        self._running = Running(config.max_num_seqs)
        self._scheduler = Scheduler(
            self._running,
            self._blocks,
            config.max_num_batched_tokens,
            config.enable_chunked_prefill,
            config.enable_prefix_caching,
            mixes=self.device.type == "cpu",  # on CUDA a step of decoding alone is a CUDA graph
        )
        self._scheduler.version = self.version
        self._present: dict[int, Sequence] = {}
        self._synchronous: set[int] = set()  # that need all tokens before each step
        self._in_flight: deque[InFlightStep] = deque()
        self._newcomers = False
        self._stale = False

    # ---- memory and weights

    @property
    def cache_bytes(self) -> int:
        """Memory that the key/value cache holds now."""
        return self._cache.pages * self._cache_shape.page_bytes if self._cache else 0

    def wake_up(self, part: RolloutPart | None = None) -> None:
        """Let the cache be allocated again, which happens for what requests need.

        It begins without known prefixes, so that a batch depends on nothing that ran before. There
        is nothing to do for the weights: the module holds them.
        """
        if part != "weights":
            self._awake = True
            self._blocks.forget()

    def sleep(self) -> None:
        """Free the cache. Requests in flight keep what was sampled for them."""
        self._awake = False
        self._synchronize_all()
        self._drop_cache()
        self._runner.rest()
        give_back_memory(self.device)

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._stale = True
        super().load_weights(stream, version)

    # ---- requests

    def _add_all(self, requests: Many[Request], on_finished: OnFinished) -> list[int]:
        return self._take_in(requests, None, on_finished)

    def add(
        self,
        request: Request,
        on_token: OnToken | None = None,
        on_finished: OnFinished | None = None,
    ) -> int:
        self.check([request])
        return self._take_in([request], on_token, on_finished)[0]

    def abort(self, number: int) -> Completion | None:
        self._synchronize_all()
        sequence = self._present.pop(number, None)
        if sequence is None:
            return None
        self._synchronous.discard(number)
        self._scheduler.remove(sequence)
        sequence.finish_reason = "abort"
        return self._completion(sequence)

    def has_work(self) -> bool:
        return bool(self._present)

    # ---- steps

    @contextmanager
    def stepping(self) -> Iterator[None]:
        with self.sampling_mode(), self._precision(), exactness(self.config.native.exact):
            changed = self._stale or self.version != self._scheduler.version
            if (adapters := adapters_in_use(self.module)) != self._adapters:
                self._adapters, changed = adapters, True
                self._runner = self._make_runner()  # it may have copied the module's structure
            self._stale = self._runner.prepare(changed)
            evicted = self._scheduler.preemptions
            try:
                yield
                self._synchronize_all()
                if evicted := self._scheduler.preemptions - evicted:
                    logger.info("%d sequences were evicted for want of cache", evicted)
            except BaseException:  # whatever it was, a step may have been left half done
                for step in self._in_flight:
                    step.abandon()
                self._reset()
                raise

    def step(self) -> None:
        if not self._awake:
            raise RolloutError("the sampler sleeps: wake it up before generating")
        if self._stale or self.version != self._scheduler.version:
            self._synchronize_all()
            self._scheduler.restart()
            self._scheduler.version = self.version
            self._stale = False
        cache = self._reserve_cache()
        if not self._scheduler.can_go_on:
            self._synchronize_all()
        if not self._present:
            return
        self._in_flight.append(self._launch(self._scheduler.schedule(), cache))
        while len(self._in_flight) > (0 if self._synchronous else self._runner.max_steps_in_flight):
            self._synchronize(self._in_flight.popleft())

    def _launch(self, step: Step, cache: KVCache) -> InFlightStep:
        """Run a step and choose its tokens, perhaps without waiting for them."""
        running, rows = self._running, step.rows
        parameters, penalties = running.sampling(rows), running.penalties(rows)
        runner_may_choose = not (self._synchronous or parameters.has_filters)
        output = self._runner.run(step, cache, parameters if runner_may_choose else None)
        if isinstance(step, Prefill) and output.hidden is not None:
            self._note_prompts(step, output.hidden)
        token_log_probs = output.token_log_probs
        if token_log_probs is None:
            sampled = sample(output.logits.float(), parameters, self._raw_log_probs, penalties)
            token_log_probs = sampled.packed()
            self._runner.newest.index_copy_(0, to_device(rows, self.device), sampled.tokens)
            if running.ranked[rows].any():
                self._note_ranks(rows, sampled.logits)
        token_log_probs = self._runner.with_trainer_log_probs(
            output.logits, token_log_probs, parameters
        )
        numbers = running.number[rows]
        return InFlightStep(step, running.expect(rows), numbers, token_log_probs)

    def _synchronize(self, begun: InFlightStep) -> None:
        """Synchronise with a step: wait for its tokens, and call the callbacks."""
        running, rows = self._running, begun.step.rows
        tokens, log_probs = begun.synchronize()
        alive = running.number[rows] == begun.numbers
        listened = np.flatnonzero(running.listened[rows] & alive).tolist()
        heard = [(index, running.at(rows[index])) for index in listened]
        finished = self._scheduler.update(begun.step, begun.positions, alive, tokens, log_probs)
        for sequence in finished:  # before callbacks, which may abort something
            del self._present[sequence.number]
            self._synchronous.discard(sequence.number)
        for index, sequence in heard:
            assert sequence.on_token is not None, "someone listens"
            sequence.on_token(sequence.number, int(tokens[index]), float(log_probs[index]))
        for sequence in finished:
            if sequence.on_finished is not None:
                sequence.on_finished(sequence.number, self._completion(sequence))

    def _synchronize_all(self) -> None:
        while self._in_flight:
            self._synchronize(self._in_flight.popleft())

    def _note_ranks(self, rows: IntArray, logits: Tensor) -> None:
        """Keep the most likely tokens of the rows that ask for them; logits (B, V)."""
        wanted = self._running.ranked[rows]
        places = np.flatnonzero(wanted)
        chosen = logits.index_select(0, torch.from_numpy(places).to(logits.device))
        top = chosen.log_softmax(-1).topk(min(int(wanted.max()), logits.shape[-1]))
        for place, values, tokens in zip(
            places.tolist(), top.values.tolist(), top.indices.tolist(), strict=True
        ):
            pairs = list(zip(tokens, values, strict=True))[: wanted[place]]
            self._running.at(rows[place]).top_log_probs.append(pairs)

    def _note_prompts(self, step: Prefill, hidden: Tensor) -> None:
        """Keep the log-probs of prompts that are asked for; hidden (T, H)."""
        begins = np.cumsum(step.counts) - step.counts
        runs = zip(step.run.tolist(), begins.tolist(), step.counts.tolist(), strict=True)
        for row, begin, count in runs:
            sequence = self._running.at(row)
            if not sequence.lacks_prompt_log_probs:
                continue
            # positions of this run that say something new of the prompt
            start = int(self._running.cached[row]) - count
            first = len(sequence.prompt_log_probs)
            last = min(start + count, len(sequence.prompt) - 1)
            if first < last:
                said = hidden[begin + first - start : begin + last - start]
                labels = sequence.prompt[first + 1 : last + 1]
                sequence.prompt_log_probs += self._runner.log_probs(said, labels)

    def _sequence(
        self, request: Request, on_token: OnToken | None, on_finished: OnFinished | None
    ) -> Sequence:
        prompt = np.array(request.prompt_ids, dtype=np.int64)
        if prompt.min() < 0 or prompt.max() >= self._vocabulary:
            raise RolloutError(
                f"a prompt has the tokens {prompt.min()} to {prompt.max()}: "
                f"the model has 0 to {self._vocabulary - 1}"
            )
        number = next(self._numbers)
        return Sequence(number, request, prompt, on_token, on_finished, self.decode)

    def _take_in(
        self, requests: Many[Request], on_token: OnToken | None, on_finished: OnFinished | None
    ) -> list[int]:
        sequences = [self._sequence(each, on_token, on_finished) for each in requests]
        self._present.update((sequence.number, sequence) for sequence in sequences)
        self._synchronous.update(
            each.number for each in sequences if each.needs_synchronous_sampling
        )
        self._scheduler.add(sequences)
        self._newcomers = True
        return [sequence.number for sequence in sequences]

    def _completion(self, sequence: Sequence) -> Completion:
        versions, params = tuple(sequence.versions), sequence.request.params
        return Completion(
            sequence.token_ids,
            sequence.log_probs,
            sequence.finish_reason,
            versions[0][0] if versions else self.version,
            versions,
            sequence.top_log_probs if params.logprobs else None,
            sequence.prompt_log_probs if params.prompt_logprobs else None,
        )

    def _precision(self) -> AbstractContextManager[object]:
        if self._runner.has_own_precision:
            return nullcontext()
        return sampling_precision(self.module, self._dtype, self.device)

    # ---- what is refused, and the cache

    def _check_exact(self) -> None:
        key = "actor_rollout_ref.rollout.native.exact=True"
        if self.device.type == "cuda" and self.config.enforce_eager:
            raise UnsupportedError(f"{key}: on CUDA it needs rollout.enforce_eager=False")
        dtypes = {parameter.dtype for parameter in self.module.parameters()}
        if dtypes != {self._dtype}:  # adapters may have another one
            raise UnsupportedError(
                f"{key} with actor_rollout_ref.rollout.dtype={self.config.dtype} (null is bfloat16 "
                "on CUDA): takes that of all parameters, which are "
                f"{', '.join(sorted(map(str, dtypes)))}"
            )

    def check(self, requests: Many[Request]) -> None:
        """Refuse what cannot be served, before anything is taken in."""
        if not self._awake:
            raise RolloutError("the sampler sleeps: wake it up before generating")
        super().check(requests)
        demands = [pages_for(len(r.prompt_ids) + r.params.max_tokens) for r in requests]
        largest = max(demands, default=0)
        if largest > self._blocks.pages and largest > (pages := self._most_pages()):
            raise too_small(f"request {demands.index(largest)}", largest, pages)

    def _most_pages(self) -> int:
        """Pages that the cache could have."""
        if self.config.kv_cache_blocks is not None:
            return self.config.kv_cache_blocks
        utilization = self.config.gpu_memory_utilization
        return affordable_pages(self._cache_shape, self.device, utilization, self.cache_bytes)

    def _reserve_cache(self) -> KVCache:
        """The cache, as large as the requests that are present could make use of."""
        if self._cache is not None and not self._newcomers:
            return self._cache
        self._newcomers = False
        demands = (pages_for(sequence.max_length) for sequence in self._present.values())
        useful = sum(heapq.nlargest(self.config.max_num_seqs, demands))
        if self._cache is None or (
            self.config.kv_cache_blocks is None and self._cache.pages < useful
        ):
            self._cache = self._enlarge_cache(useful)
        return self._cache

    def _enlarge_cache(self, useful: int) -> KVCache:
        if self._blocks.is_empty:
            self._drop_cache()  # before the next one is measured and allocated
        elif self._cache is not None:
            useful = max(useful, 2 * self._cache.pages)  # each time, what it holds is copied
        pages = self.config.kv_cache_blocks or min(useful, self._most_pages())
        # Memory may have become less since the requests were taken in.
        largest = max(pages_for(sequence.max_length) for sequence in self._present.values())
        if largest > pages:
            raise too_small("a request", largest, pages)
        if self._cache is None:
            self._blocks.grow(pages)
            return KVCache(self._cache_shape, pages, self.device)
        if pages > self._cache.pages:
            self._cache.grow(pages)
            self._blocks.grow(pages)
        return self._cache

    def _drop_cache(self) -> None:
        self._scheduler.restart()
        self._blocks.drop()
        self._cache = None
