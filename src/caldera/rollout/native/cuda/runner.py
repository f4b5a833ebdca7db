"""Running steps on CUDA without waiting for them: compiled, captured in CUDA graphs, sampled on the
device."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn

from caldera.config import RolloutConfig
from caldera.models.forward import language_head
from caldera.rollout.native.attention import to_device
from caldera.rollout.native.backbone import compiled_backbone, copied_structure, plain_backbone
from caldera.rollout.native.blocks import IntArray
from caldera.rollout.native.cache import CacheShape, KVCache
from caldera.rollout.native.cuda.graphs import (
    CapturedDecode,
    DecodeGraphs,
    DeviceState,
    capture_sizes,
    step_inputs,
)
from caldera.rollout.native.cuda.launch import NO_PDL, PDL
from caldera.rollout.native.layers import STACKS, Product, put_joint, stackable
from caldera.rollout.native.runner import Output, Runner
from caldera.rollout.native.sampler import SamplingRows
from caldera.rollout.native.steps import Decode, Prefill

if TYPE_CHECKING:
    from caldera.rollout.native.cuda.pdl_steps import PdlSteps


# ---- The module as the sampler runs it on CUDA: the same weights, in fewer and larger matrices


class FusedModule:
    """Shares the module's weights, with fused QKV and gate/up matrices.

    Where layers multiply the same input, their weights come to lie behind each other in memory, so
    that one product takes all of them, while the module keeps a parameter for each. An optimiser
    that changes these in place changes the fused module.

    In another precision than the module's, the weights are copies, and `refresh` brings them up to
    date.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """`dtype`: of the computation."""
        self._casts: list[tuple[Tensor, Tensor]] = []  # from the module, to the copy
        memo: dict[int, object] = {id(each): each for each in module.buffers()}
        for parameter in module.parameters():
            memo[id(parameter)] = self._shared_parameter(parameter, dtype)
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

    def _shared_parameter(self, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        if parameter.dtype == dtype:
            return parameter
        own = nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=False)
        self._casts.append((parameter, own))
        return own

    def refresh(self) -> None:
        """Copy the module's weights where they are not shared."""
        with torch.no_grad():
            for source, target in self._casts:
                target.copy_(source)

    @property
    def has_moved(self) -> bool:
        """Whether weights have other addresses than when the fused module was made."""
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
    """The fused module, compiled; decode steps are CUDA graphs that are replayed.

    In exact mode nothing is compiled, for fused operations round differently.
    """

    max_steps_in_flight = 1
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
        sizes = config.cudagraph_capture_sizes or capture_sizes(config.max_num_seqs)
        self._sizes = sorted({*sizes, config.max_num_seqs})
        self._is_exact = config.native.exact
        self._fused: FusedModule | None = None
        self._graphs: DecodeGraphs | None = None
        self._pdl_steps: PdlSteps | None = None
        self._weights_move = False  # as they do when the trainer offloads them

    def rest(self) -> None:
        if self._weights_move:  # the fused module would hold the old ones
            self._release()

    def _release(self) -> None:
        self._fused = self._graphs = self._pdl_steps = None
        self._module, self._backbone = self._source, plain_backbone(self._source)

    def prepare(self, weights_changed: bool) -> bool:
        if self._fused is not None and self._fused.has_moved:
            self._weights_move = True
            self._release()  # before the next one needs the memory
        if self._fused is None:
            self._fused = FusedModule(self._source, self._dtype)
            self._module = self._fused.module
            self._pdl_steps = self._pdl_decode()  # which knows layers that are not compiled yet
            make_backbone = plain_backbone if self._is_exact else compiled_backbone
            self._backbone = make_backbone(self._module)
            self._graphs = DecodeGraphs(self._run_decode, self._sizes, self._state)
        else:
            self._fused.refresh()
        self._state.mailbox.align()  # an error may have kept a step from reading its message
        return weights_changed

    def _pdl_decode(self) -> PdlSteps | None:
        from caldera.rollout.native.cuda.pdl_steps import make_pdl_steps, supports_pdl

        if self._is_exact or not supports_pdl(self._device, self._dtype):
            return None
        return make_pdl_steps(self._module, self._state)

    def _logits(self, hidden: Tensor) -> Tensor:
        head = language_head(self._module)
        # As the trainer lays them out: a row begins at a multiple of 16 elements.
        logits = hidden.new_empty(len(hidden), -(-len(head) // 16) * 16)[:, : len(head)]
        return torch.mm(hidden, head.t(), out=logits)

    def with_trainer_log_probs(
        self, logits: Tensor, token_log_probs: Tensor, sampling: SamplingRows
    ) -> Tensor:
        if not self._is_exact:
            return token_log_probs
        from caldera.models.triton_head import rows_forward

        tokens, exact = token_log_probs[0].long(), torch.empty_like(token_log_probs)
        exact[0] = token_log_probs[0]
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
        on_device = to_device(inputs, self._device)
        return output._replace(
            token_log_probs=choose(output.logits, on_device, self.newest, self._raw)
        )

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
        token_log_probs = chosen.token_log_probs if self._is_exact else chosen.reply
        return Output(chosen.logits, None, token_log_probs if sampling is not None else None)

    def _enter_known(self, rows: IntArray, tokens: IntArray) -> None:
        """Tokens that nothing was sampled on the device for, as at the end of a prompt."""
        known = tokens >= 0
        if known.any():
            places = to_device(rows[known], self._device)
            self.newest.index_copy_(0, places, to_device(tokens[known], self._device))

    def _run_decode(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        from caldera.rollout.native.cuda.step_kernels import begin_step, choose

        state = self._state
        if self._pdl_steps is not None:
            hidden = self._pdl_steps(inputs)
        else:
            tokens, positions = begin_step(state.mailbox, inputs, state.newest, state.tables)
            hidden = self._backbone(tokens, positions, CapturedDecode(state, inputs))
        logits = self._logits(hidden)
        launch = NO_PDL if self._pdl_steps is None else PDL
        return logits, choose(logits, inputs, state.newest, self._raw, launch, state.mailbox)
