"""The seam of samplers: tokens in, tokens out, with the log-probability of each sampled token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from caldera.errors import RolloutError
from caldera.models.forward import base_module
from caldera.registry import Registry
from caldera.rollout.weights import copy_weights

if TYPE_CHECKING:
    from caldera.config import RolloutConfig

FinishReason = Literal["stop", "length"]
RolloutPart = Literal["weights", "kv_cache"]


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one completion are chosen."""

    max_tokens: int
    temperature: float = 1.0
    """0 takes the most likely token each time."""
    top_k: int = -1
    """Only this many most likely tokens are sampled from; -1 or 0 for all."""
    top_p: float = 1.0
    """Only the fewest tokens that together have this probability are sampled from."""
    stop_token_ids: frozenset[int] = frozenset()
    """A completion ends after one of these, which is its last token."""
    ignore_eos: bool = False
    """Stop tokens do not end a completion."""


@dataclass(frozen=True)
class Request:
    """One completion to sample. The seed decides its random numbers."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int


@dataclass(frozen=True)
class Completion:
    """What was sampled, and by which version of the weights."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_version: int


OnFinished = Callable[[int, Completion], None]
"""(place among the requests, what was sampled for it)."""


class Rollout(ABC):
    """Samples from a causal language model, which it may share with a trainer.

    The module's parameters change in `load_weights` alone. Whoever changes them from outside sets
    `version`, which completions carry.
    """

    def __init__(self, config: RolloutConfig, module: nn.Module, device: torch.device) -> None:
        self.config = config
        self.module = module
        self.device = device
        self.version = 0

    @abstractmethod
    def generate(
        self, requests: Sequence[Request], on_finished: OnFinished | None = None
    ) -> list[Completion]:
        """One completion a request, in the order of the requests.

        `on_finished` is told of each as soon as it ends, in whatever order that happens.
        """

    @abstractmethod
    def wake_up(self, part: RolloutPart | None = None) -> None:
        """Make ready to generate: the part named, or both."""

    @abstractmethod
    def sleep(self) -> None:
        """Give back the memory that sampling needs and training does not."""

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights, by their Hugging Face names, into the module."""
        copy_weights(base_module(self.module), stream)
        self.version = version

    def check_lengths(self, requests: Sequence[Request]) -> None:
        """Refuse requests that are too long for `rollout.max_model_len`, or empty."""
        config = self.config
        longest = config.max_model_len or config.prompt_length + config.response_length
        for index, request in enumerate(requests):
            prompt, new = len(request.prompt_ids), request.params.max_tokens
            if prompt < 1 or new < 1:
                raise RolloutError(
                    f"request {index} has {prompt} prompt tokens and max_tokens={new}: "
                    "both must be at least 1"
                )
            if prompt + new > longest:
                raise RolloutError(
                    f"request {index} needs {prompt} prompt tokens + {new} new tokens = "
                    f"{prompt + new}, more than rollout.max_model_len={longest}"
                )

    @contextmanager
    def sampling_mode(self) -> Iterator[None]:
        """Evaluation mode without gradients; afterwards each submodule is in its mode of before.

        Not `inference_mode`: what a shared module caches in it would be useless to training.
        """
        modes = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for part, training in modes:
                part.training = training


RolloutFactory = Callable[["RolloutConfig", nn.Module, torch.device], Rollout]

ROLLOUTS: Registry[RolloutFactory] = Registry("actor_rollout_ref.rollout.name")
