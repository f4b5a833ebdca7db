"""Running steps on CUDA without waiting for them: compiled, recorded, sampled on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn

from caldera.config import RolloutConfig
from caldera.models.forward import language_head
from caldera.rollout.native.attention import to_device
from caldera.rollout.native.blocks import IntArray
from caldera.rollout.native.cache import CacheShape, KVCache
from caldera.rollout.native.cuda.graphs import (
    DecodeGraphs,
    DeviceState,
    RecordedDecode,
    ladder,
    step_inputs,
)
from caldera.rollout.native.cuda.launch import CHAINED, UNCHAINED
from caldera.rollout.native.layers import STACKS, Product, put_joint, stackable
from caldera.rollout.native.runner import Output, Runner
from caldera.rollout.native.sampler import SamplingRows
from caldera.rollout.native.steps import Decode, Prefill
from caldera.rollout.native.trunk import compiled_trunk, copied_structure, plain_trunk

if TYPE_CHECKING:
    from caldera.rollout.native.cuda.chained import ChainedSteps


# ---- The module as the sampler runs it on CUDA: the same weights, in fewer and larger matrices


class Twin:
    """A copy of the module's structure that has its weights, not copies of them.

    Where layers multiply the same input, their weights come to lie behind each other in memory, so
    that the twin multiplies by all of them at once, while the module keeps a parameter for each. An
    optimiser that changes these in place changes the twin.

    In another precision than the module's, the twin's weights are its own, and `refresh` brings
    them up to date.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """`dtype`: what the twin computes in."""
        self._casts: list[tuple[Tensor, Tensor]] = []  # from the module, to the twin
        memo: dict[int, object] = {id(each): each for each in module.buffers()}
        for parameter in module.parameters():
            memo[id(parameter)] = self._counterpart(parameter, dtype)
        self.module = copied_structure(module, memo)
        self._held: list[Tensor] = [
            parameter
            for container in self.module.modules()
            for names in STACKS
            for parameter in _stack(container, names)
        ]
        self._held += [*self.module.parameters(), *self.module.buffers()]
        self._addresses = self._find_addresses()
        self.refresh()

    def _counterpart(self, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        if parameter.dtype == dtype:
            return parameter
        own = nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=False)
        self._casts.append((parameter, own))
        return own

    def refresh(self) -> None:
        """Take over the module's weights, where they are not the twin's as well."""
        with torch.no_grad():
            for source, target in self._casts:
                target.copy_(source)

    @property
    def has_moved(self) -> bool:
        """Whether weights are elsewhere than when the twin was made."""
        return self._addresses != self._find_addresses()

    def _find_addresses(self) -> list[int]:
        return [each.data_ptr() for each in self._held]


def _stack(container: nn.Module, names: tuple[str, ...]) -> list[nn.Parameter]:
    """Replace the layers of these names by parts of one; returns their parameters."""
    linears = stackable(container, names)
    if not linears:
        return []
    weights = [cast(nn.Parameter, linear.weight) for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    weight = _joined(weights)
    bias = _joined(biases) if biases else None
    sizes = [linear.out_features for linear in linears]
    put_joint(container, names, Product(weight, bias), sizes)
    return [*weights, *biases]


def _joined(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor of all, of which the parameters become parts."""
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


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
