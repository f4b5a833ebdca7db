"""Running the model for one step of the scheduler."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from caldera.models.forward import hidden_states, language_head, language_logits
from caldera.models.head import head_outputs
from caldera.rollout.native.attention import PagedChunks, PagedDecode, PagedPrefill, to_device
from caldera.rollout.native.blocks import IntArray
from caldera.rollout.native.cache import KVCache
from caldera.rollout.native.steps import Chunks, Decode, Prefill, Step


class Output(NamedTuple):
    logits: Tensor  # (B, V) of each row of the step, float32
    hidden: Tensor  # (T, H) of each token of the step


class Runner:
    """Logits of each row's last token."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device

    def run(self, step: Step, cache: KVCache) -> Output:
        if isinstance(step, Decode):
            return self._decode(step, cache)
        return self._prefill(step, cache)

    def _prefill(self, step: Prefill, cache: KVCache) -> Output:
        hidden = self._packed(step, cache)  # (T, H)
        if len(step.page_copies):
            sources, targets = to_device(step.page_copies.T.copy(), self._device)
            cache.copy_pages(sources, targets)
        ends = np.cumsum(step.lengths) - 1
        runs, places = np.unique(step.leaders, return_inverse=True)
        last = to_device(ends[runs], self._device)
        logits = language_logits(self._module, hidden.index_select(0, last))
        if len(step.rows) > len(runs):
            logits = logits.index_select(0, to_device(places, self._device))
        return Output(logits, hidden)

    def log_probs(self, hidden: Tensor, labels: IntArray) -> list[float]:
        """Of the tokens that follow, (n,), at hidden states (n, H), before any temperature."""
        head = language_head(self._module)
        told = head_outputs(hidden, head, to_device(labels, self._device), 1.0, ("log_probs",))
        found: list[float] = told["log_probs"].tolist()
        return found

    def _packed(self, step: Prefill, cache: KVCache) -> Tensor:
        tokens = to_device(step.token_ids, self._device)[None]
        if isinstance(step, Chunks):
            counts = np.array(step.lengths)
            chunks = PagedChunks(cache, step.tables, counts, step.ends, step.slots, self._device)
            positions = to_device(step.positions, self._device)[None]
            return hidden_states(self._module, tokens, positions, chunks)
        prefill = PagedPrefill(cache, step.lengths, step.slots, self._device)
        return hidden_states(self._module, tokens, prefill.packed.position_ids, prefill)

    def _decode(self, step: Decode, cache: KVCache) -> Output:
        context = PagedDecode(cache, step.tables, step.lengths, step.slots, self._device)
        tokens = to_device(step.token_ids, self._device)[None]
        positions = to_device(step.lengths - 1, self._device)[None]
        hidden = hidden_states(self._module, tokens, positions, context)
        return Output(language_logits(self._module, hidden), hidden)
