"""Running steps on CUDA without waiting for them: compiled, recorded, sampled on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from caldera.config import RolloutConfig
from caldera.models.forward import language_head
from caldera.rollout.native.attention import to_device
from caldera.rollout.native.blocks import IntArray
from caldera.rollout.native.cache import CacheShape, KVCache
from caldera.rollout.native.cuda.chains import CHAINED, UNCHAINED
from caldera.rollout.native.cuda.graphs import (
    DecodeGraphs,
    DeviceState,
    RecordedDecode,
    ladder,
    step_inputs,
)
from caldera.rollout.native.cuda.twin import Twin
from caldera.rollout.native.runner import Output, Runner
from caldera.rollout.native.sampler import SamplingRows
from caldera.rollout.native.steps import Decode, Prefill
from caldera.rollout.native.trunk import compiled_trunk, plain_trunk

if TYPE_CHECKING:
    from caldera.rollout.native.cuda.chained import ChainedSteps


class CudaRunner(Runner):
    """The module's twin, compiled; decode steps are replayed from recordings.

    In exact mode nothing is compiled, for fused operations round differently.
    """

    steps_ahead = 1
    has_own_precision = True

    def __init__(
        self, module: nn.Module, device: torch.device, config: RolloutConfig, shape: CacheShape
    ) -> None:
        super().__init__(module, device, config.max_num_seqs)
        self._dtype = shape.dtype
        self._raw = config.logprobs_mode == "raw_logprobs"
        longest = config.longest_sequence
        self._state = DeviceState(config.max_num_seqs, longest, shape.layers, device)
        self.newest = self._state.newest
        sizes = config.cudagraph_capture_sizes or ladder(config.max_num_seqs)
        self._sizes = sorted({*sizes, config.max_num_seqs})
        self._is_exact = config.native.exact
        self._twin: Twin | None = None
        self._graphs: DecodeGraphs | None = None
        self._chained: ChainedSteps | None = None
        self._weights_move = False  # as they do when the trainer offloads them

    def rest(self) -> None:
        if self._weights_move:  # the twin would hold the old ones, and its steps are of no use
            self._release()

    def _release(self) -> None:
        self._twin = self._graphs = self._chained = None
        self._module, self._trunk = self._source, plain_trunk(self._source)

    def prepare(self, weights_changed: bool) -> bool:
        if self._twin is not None and self._twin.has_moved:
            self._weights_move = True
            self._release()  # before the next one needs the memory
        if self._twin is None:
            self._twin = Twin(self._source, self._dtype)
            self._module = self._twin.module
            self._chained = self._chained_steps()  # which knows layers that are not compiled yet
            make_trunk = plain_trunk if self._is_exact else compiled_trunk
            self._trunk = make_trunk(self._module)
            self._graphs = DecodeGraphs(self._run_decode, self._sizes, self._state)
        else:
            self._twin.refresh()
        self._state.mail.align()  # an error may have kept a step from reading its letter
        return weights_changed

    def _chained_steps(self) -> ChainedSteps | None:
        from caldera.rollout.native.cuda.chained import can_chain, chained_steps

        if self._is_exact or not can_chain(self._device, self._dtype):
            return None
        return chained_steps(self._module, self._state)

    def _logits(self, hidden: Tensor) -> Tensor:
        head = language_head(self._module)
        # As the trainer lays them out: a row begins at a multiple of 16 elements.
        logits = hidden.new_empty(len(hidden), -(-len(head) // 16) * 16)[:, : len(head)]
        return torch.mm(hidden, head.t(), out=logits)

    def with_trainer_log_probs(
        self, logits: Tensor, told: Tensor, sampling: SamplingRows
    ) -> Tensor:
        if not self._is_exact:
            return told
        from caldera.models.triton_head import rows_forward

        tokens, exact = told[0].long(), torch.empty_like(told)
        exact[0] = told[0]
        for temperature in np.unique(sampling.temperature).tolist():
            places = np.flatnonzero(sampling.temperature == temperature)
            chosen = slice(None) if len(places) == len(tokens) else to_device(places, self._device)
            divisor = 1.0 if self._raw or temperature == 0 else temperature
            log_probs = torch.empty(len(places), device=self._device)
            normaliser = torch.empty_like(log_probs)
            rows_forward(logits[chosen], tokens[chosen], divisor, log_probs, normaliser, None, None)
            exact[1, chosen] = log_probs.view(torch.int32)
        return exact

    def _prefill(self, step: Prefill, cache: KVCache, sampling: SamplingRows | None) -> Output:
        from caldera.rollout.native.cuda.step_kernels import choose

        output = super()._prefill(step, cache, sampling)
        self._enter_tables(step)
        if sampling is None:
            return output
        places = np.zeros_like(step.rows)  # any but -1: they are no gaps
        inputs = step_inputs(step.rows, places, places, sampling)
        told = to_device(inputs, self._device)
        return output._replace(told=choose(output.logits, told, self.newest, self._raw))

    def _enter_tables(self, step: Prefill) -> None:
        """Let the steps that follow find the pages of the rows that are sampled for."""
        state = self._state
        tables = step.tables_of_rows[:, : state.tables.shape[1]].astype(np.int32)
        rows, pages = to_device(step.rows, self._device), to_device(tables, self._device)
        state.tables[:, : tables.shape[1]].index_copy_(0, rows, pages)

    def _decode(self, step: Decode, cache: KVCache, sampling: SamplingRows | None) -> Output:
        self._state.find(cache)
        self._enter_known(step.rows, step.token_ids)
        inputs = step_inputs(step.rows, step.positions, step.slots, sampling)
        assert self._graphs is not None, "steps are prepared for"
        chosen = self._graphs.run(inputs)
        told = chosen.told if self._is_exact else chosen.answer
        return Output(chosen.logits, None, told if sampling is not None else None)

    def _enter_known(self, rows: IntArray, tokens: IntArray) -> None:
        """Tokens that nothing was sampled on the device for, as at the end of a prompt."""
        known = tokens >= 0
        if known.any():
            places = to_device(rows[known], self._device)
            self.newest.index_copy_(0, places, to_device(tokens[known], self._device))

    def _run_decode(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        from caldera.rollout.native.cuda.step_kernels import begin_step, choose

        state = self._state
        if self._chained is not None:
            hidden = self._chained(inputs)
        else:
            tokens, positions = begin_step(state.mail, inputs, state.newest, state.tables)
            hidden = self._trunk(tokens, positions, RecordedDecode(state, inputs))
        logits = self._logits(hidden)
        chain = UNCHAINED if self._chained is None else CHAINED
        return logits, choose(logits, inputs, state.newest, self._raw, chain, state.mail)
