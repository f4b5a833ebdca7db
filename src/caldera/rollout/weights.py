"""Copying a stream of named weights into a module."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from caldera.errors import RolloutError
from caldera.models.attention import PackedSequences
from caldera.models.forward import base_module, hidden_states, language_logits

NAMES_SHOWN = 5


def copy_weights(module: nn.Module, stream: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every weight into the module's tensor of that name, in place.

    A tied weight may come under any of its names, or under several. The stream must name nothing
    that the module lacks, and leave no parameter out.
    """
    targets: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    optional = dict(module.named_buffers())
    copied: set[int] = set()
    unexpected: list[str] = []
    with torch.no_grad():
        for name, weight in stream:
            target = targets.get(name, optional.get(name))
            if target is None:
                unexpected.append(name)
                continue
            if target.shape != weight.shape:
                raise RolloutError(
                    f"weight {name!r} has shape {tuple(weight.shape)}, "
                    f"the sampler's has {tuple(target.shape)}"
                )
            target.copy_(weight)
            copied.add(id(target))
    missing = [name for name, target in targets.items() if id(target) not in copied]
    if missing or unexpected:
        raise RolloutError(
            f"weights do not fit the sampler's {type(module).__name__}: "
            f"missing {_listed(missing)}; unexpected {_listed(unexpected)}"
        )


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


# ---- The floating-point format in which a shared module samples


def sampling_dtype(module: nn.Module, name: str | None, device: torch.device) -> torch.dtype:
    """What `rollout.dtype` asks for; null: the parameters' own, or bfloat16 on CUDA."""
    if name is not None:
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    return torch.bfloat16 if device.type == "cuda" else _parameter_dtype(module)


def sampling_precision(
    module: nn.Module, dtype: torch.dtype, device: torch.device
) -> AbstractContextManager[object]:
    """To be entered around all of a sampling, so that parameters of another dtype are cast once."""
    if dtype == _parameter_dtype(module):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def _parameter_dtype(module: nn.Module) -> torch.dtype:
    return next(base_module(module).parameters()).dtype


# ---- A few tokens whose log-probs trainer and sampler must agree on

TOKENS = 24
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.15}
"""Largest mean difference of log-probs, by the coarser precision of the two. Other weights differ
by far more, and rounding by less."""


@dataclass(frozen=True)
class Probe:
    """The trainer's log-probs of the tokens."""

    token_ids: list[int]
    log_probs: list[float]
    """Of each token but the first."""
    dtype: torch.dtype = torch.float32
    """Precision of the trainer's forward pass."""

    def check(self, log_probs: list[float], dtype: torch.dtype, told: str) -> None:
        """Raise unless a sampler of that precision has the same log-probs; `told` is its name."""
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
    """The log-probs of a module that is whole."""
    tokens = probe_tokens(base_module(module).config.vocab_size, longest)
    packed = PackedSequences([len(tokens)], device)
    ids = torch.tensor(tokens, device=device)  # (T,)
    with torch.no_grad():
        hidden = hidden_states(module, ids[None], packed.position_ids, packed)  # (T, H)
        log_probs = language_logits(module, hidden[:-1]).log_softmax(-1)  # (T - 1, V)
    chosen = log_probs.gather(1, ids[1:, None])[:, 0].tolist()
    return Probe(tokens, chosen, next(module.parameters()).dtype)
