"""Running the model for one step of the scheduler."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from caldera.models.forward import hidden_states, language_logits
from caldera.rollout.native.attention import PagedDecode, PagedPrefill, to_device
from caldera.rollout.native.cache import KVCache
from caldera.rollout.native.scheduler import Decode, Prefill


class Runner:
    """Logits of each row's last token."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device

    def run(self, step: Prefill | Decode, cache: KVCache) -> Tensor:
        """Float32 logits (B, V), one row a row of the step."""
        if isinstance(step, Prefill):
            return self._prefill(step, cache)
        return self._decode(step, cache)

    def _prefill(self, step: Prefill, cache: KVCache) -> Tensor:
        context = PagedPrefill(cache, step.lengths, step.slots, self._device)
        tokens = to_device(step.token_ids, self._device)[None]
        hidden = hidden_states(self._module, tokens, context.packed.position_ids, context)
        last = to_device(np.cumsum(step.lengths) - 1, self._device)
        logits = language_logits(self._module, hidden.index_select(0, last))
        if len(step.page_copies):
            sources, targets = to_device(step.page_copies.T.copy(), self._device)
            cache.copy_pages(sources, targets)
        if len(step.rows) == len(step.lengths):
            return logits
        return logits.index_select(0, to_device(step.leaders, self._device))

    def _decode(self, step: Decode, cache: KVCache) -> Tensor:
        context = PagedDecode(cache, step.tables, step.lengths, step.slots, self._device)
        tokens = to_device(step.token_ids, self._device)[None]
        positions = to_device(step.lengths - 1, self._device)[None]
        hidden = hidden_states(self._module, tokens, positions, context)
        return language_logits(self._module, hidden)
