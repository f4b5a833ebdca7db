"""A few tokens whose log-probs trainer and sampler must agree on."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import nn

from caldera.errors import RolloutError
from caldera.models.attention import PackedSequences
from caldera.models.forward import base_module, hidden_states, language_logits

TOKENS = 24
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.15}
"""Largest mean difference of log-probs, by the coarser precision of the two. Other weights differ
by far more, and rounding by less."""


@dataclass(frozen=True)
class Probe:
    """What the trainer says of the tokens."""

    token_ids: list[int]
    log_probs: list[float]
    """Of each token but the first."""
    dtype: torch.dtype = torch.float32
    """Precision of the trainer's forward pass."""

    def check(self, log_probs: list[float], dtype: torch.dtype, told: str) -> None:
        """Raise unless a sampler of that precision says the same; `told` is who it is."""
        if not self.log_probs:  # there is room for one token alone
            return
        pairs = zip(self.log_probs, log_probs, strict=True)
        difference = sum(abs(ours - theirs) for ours, theirs in pairs) / len(log_probs)
        tolerance = max(TOLERANCE[dtype], TOLERANCE[self.dtype])
        if not difference <= tolerance:  # which nan is not, either
            raise RolloutError(
                f"{told} does not compute with the trainer's weights: log-probs of a probe of "
                f"{len(self.token_ids)} tokens differ by {difference:.4g} on average, more than "
                f"{tolerance:g}. No sample was drawn"
            )


def probe_tokens(vocabulary: int, longest: int) -> list[int]:
    """Always the same ones, anywhere in the vocabulary; `longest` is `max_model_len`."""
    draw = random.Random(0)
    # An engine samples a token after those that it is asked about.
    return [draw.randrange(vocabulary) for _ in range(min(TOKENS, longest - 1))]


def probe_module(module: nn.Module, device: torch.device, longest: int) -> Probe:
    """What a module that is whole says of them."""
    tokens = probe_tokens(base_module(module).config.vocab_size, longest)
    packed = PackedSequences([len(tokens)], device)
    ids = torch.tensor(tokens, device=device)  # (T,)
    with torch.no_grad():
        hidden = hidden_states(module, ids[None], packed.position_ids, packed)  # (T, H)
        log_probs = language_logits(module, hidden[:-1]).log_softmax(-1)  # (T - 1, V)
    chosen = log_probs.gather(1, ids[1:, None])[:, 0].tolist()
    return Probe(tokens, chosen, next(module.parameters()).dtype)
