"""Running the model for one step of the scheduler."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from caldera.models.attention import AttentionContext
from caldera.models.forward import base_module, language_head, language_logits
from caldera.models.head import head_outputs
from caldera.rollout.native.attention import PagedAttention, to_device
from caldera.rollout.native.backbone import Backbone, plain_backbone
from caldera.rollout.native.blocks import IntArray
from caldera.rollout.native.cache import KVCache
from caldera.rollout.native.sampler import SamplingRows
from caldera.rollout.native.steps import Decode, Prefill, Step


class Output(NamedTuple):
    logits: Tensor  # (B, V) of each row of the step
    hidden: Tensor | None  # (T, H) of each token of the step, if it was a prefill
    token_log_probs: Tensor | None = (
        None  # (2, B) tokens and log-probs, where they are chosen already
    )


class Runner:
    """Logits of each row's last token."""

    max_steps_in_flight = 0
    """Asynchronous scheduling: steps that may be in flight when the next one is launched."""
    has_own_precision = False
    """Whether it computes in the sampler's precision, whatever the module's parameters have."""

    def __init__(self, module: nn.Module, device: torch.device, rows: int) -> None:
        """`rows` sequences run at a time."""
        self._source = self._module = module
        self._checksums: list[tuple[int, int]] | None = None
        self._device = device
        self._backbone: Backbone = plain_backbone(module)
        self.newest = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        """Each row's newest token."""

    def prepare(self, weights_changed: bool) -> bool:
        """To be called before the steps that follow, in which the weights do not change.

        Returns whether they have changed since the last time, as is known or found. On a GPU
        nobody looks: a caller that changes weights sets `weights_changed`.
        """
        if self._device.type != "cpu":
            return weights_changed
        before = self._checksums
        self._checksums = [(p.data_ptr(), sum_of_bits(p)) for p in self._source.parameters()]
        return weights_changed or (before is not None and before != self._checksums)

    def rest(self) -> None:
        """Nothing is run for a while: give back what is easily made again."""

    def run(self, step: Step, cache: KVCache, sampling: SamplingRows | None) -> Output:
        """`sampling`: how tokens may be chosen here, if the device can do that alone."""
        if isinstance(step, Decode):
            return self._decode(step, cache, sampling)
        return self._prefill(step, cache, sampling)

    def with_trainer_log_probs(
        self, logits: Tensor, token_log_probs: Tensor, sampling: SamplingRows
    ) -> Tensor:
        """The chosen tokens for rows of logits, (2, B), with the log-probs of the trainer."""
        return token_log_probs

    def _prefill(self, step: Prefill, cache: KVCache, sampling: SamplingRows | None) -> Output:
        hidden = self._hidden(step, cache)
        if len(step.page_copies):
            sources, targets = to_device(step.page_copies.T.copy(), self._device)
            cache.copy_pages(sources, targets)
        ends = np.cumsum(step.counts) - 1
        runs, places = np.unique(step.leaders, return_inverse=True)
        last = to_device(ends[runs], self._device)
        logits = self._logits(hidden.index_select(0, last))
        if len(step.rows) > len(runs):
            logits = logits.index_select(0, to_device(places, self._device))
        return Output(logits, hidden)

    def log_probs(self, hidden: Tensor, labels: IntArray) -> list[float]:
        """Of the tokens that follow, (n,), at hidden states (n, H), before any temperature."""
        head = language_head(self._module)
        outputs = head_outputs(hidden, head, to_device(labels, self._device), 1.0, ("log_probs",))
        found: list[float] = outputs["log_probs"].tolist()
        return found

    def _logits(self, hidden: Tensor) -> Tensor:
        return language_logits(self._module, hidden)

    def _hidden(self, step: Step, cache: KVCache) -> Tensor:
        """Hidden states (T, H) of the step's tokens."""
        positions = to_device(step.positions, self._device)[None]
        cache.begin_pass()
        hidden = self._backbone(self._tokens(step), positions, self._attention(step, cache))
        cache.check_pass(type(base_module(self._module)).__name__)
        return hidden

    def _attention(self, step: Step, cache: KVCache) -> AttentionContext:
        """How the step's tokens attend."""
        return PagedAttention(cache, step, self._device)

    def _tokens(self, step: Step) -> Tensor:
        """The step's tokens (1, T). One that is still being sampled is its row's newest."""
        tokens = to_device(step.token_ids, self._device)
        if (step.token_ids < 0).any():
            rows = to_device(np.repeat(step.run, step.counts), self._device)
            newest = self.newest.index_select(0, rows)
            tokens = torch.where(tokens < 0, newest, tokens)
        return tokens[None]

    def _decode(self, step: Decode, cache: KVCache, sampling: SamplingRows | None) -> Output:
        return Output(self._logits(self._hidden(step, cache)), None)


def sum_of_bits(tensor: Tensor) -> int:
    """Of what a tensor holds, as whole numbers of 64 bits: another one when it has changed.

    PyTorch's own count of changes stays as it was when a fused optimiser takes a step. This reads
    the weights, which takes a few hundredths of a second for 500 MB.
    """
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = len(flat) // 8 * 8
    return int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum())
