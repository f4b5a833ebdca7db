"""The seam of samplers: tokens in, tokens out, with the log-probability of each sampled token."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from caldera.config.samplers import (
    KEY,
    NEUTRAL,
    SAMPLERS,
    SamplerTraits,
    check_taken,
    takers_of,
)
from caldera.data.importing import load_class
from caldera.errors import CalderaError, RolloutError, UnsupportedError
from caldera.models.forward import base_module
from caldera.models.loading import DTYPES
from caldera.registry import Registry
from caldera.rollout.weights import copy_weights

if TYPE_CHECKING:
    from caldera.config import RolloutConfig
    from caldera.rollout.engines.weights import WeightSource
    from caldera.rollout.weights import Probe


FinishReason = Literal["stop", "length", "abort"]
RolloutPart = Literal["weights", "kv_cache"]


LOWEST_TEMPERATURE = 1e-6
"""Logits are divided by it, and must stay numbers."""


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
    min_p: float = 0.0
    """Only tokens that have this share of the most likely one's probability are sampled from."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or completion are divided by it, or multiplied if negative."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the completion has."""
    frequency_penalty: float = 0.0
    """Taken off the logits of a token as often as the completion has it."""
    stop_token_ids: frozenset[int] = frozenset()
    """A completion ends after one of these, which is its last token."""
    ignore_eos: bool = False
    """Stop tokens do not end a completion."""
    stop: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these in its text. The rollout's
    `decode` must be set."""
    logprobs: int = 0
    """How many of the most likely tokens to return, with their log-probs, beside each token."""
    prompt_logprobs: bool = False
    """Whether to return the log-probs of the prompt's tokens, before temperature and penalties."""

    def __post_init__(self) -> None:
        for name, takes, fine in (
            (
                "temperature",
                f"0, or {LOWEST_TEMPERATURE} and more",
                self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature < inf,
            ),
            ("top_p", "0 to 1", 0 <= self.top_p <= 1),
            ("min_p", "0 to 1", 0 <= self.min_p <= 1),
            ("repetition_penalty", "more than 0", 0 < self.repetition_penalty < inf),
            ("presence_penalty", "a number", isfinite(self.presence_penalty)),
            ("frequency_penalty", "a number", isfinite(self.frequency_penalty)),
            ("logprobs", "0 or more", self.logprobs >= 0),
            ("stop", "strings that are not empty", "" not in self.stop),
        ):
            if not fine:
                raise RolloutError(
                    f"sampling parameter {name}={getattr(self, name)!r} cannot be honoured: "
                    f"takes {takes}"
                )

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True)
class Request:
    """One completion to sample. The seed decides its random numbers."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int
    session: str | None = None
    """Requests of one session, such as the turns of a conversation, go to the same of several
    engines, which may have their beginning cached."""


@dataclass(frozen=True)
class Completion:
    """The sampled tokens, and the versions of the weights that sampled them."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_version: int
    """That of the first token, so the oldest: the staleness of a sample is measured by it."""
    weight_versions: tuple[tuple[int, int], ...] = ()
    """(version, how many tokens in a row it sampled), in order; empty: `weight_version` did all."""

    top_log_probs: list[list[tuple[int, float]]] | None = None
    """Beside each token, the most likely ones with their log-probs, if they were asked for."""
    prompt_log_probs: list[float] | None = None
    """Of each token of the prompt but the first, if they were asked for."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Of an agent's trajectory: columns for its scorer beside the tokens."""

    def token_versions(self) -> list[int]:
        """The version that sampled each token."""
        if not self.weight_versions:
            return [self.weight_version] * len(self.token_ids)
        return [version for version, count in self.weight_versions for _ in range(count)]


@dataclass(frozen=True)
class Piece:
    """Tokens of a completion that is still being sampled."""

    token_ids: list[int]
    log_probs: list[float]
    completion: Completion | None = None
    """The whole, in the last piece, which has no tokens itself."""


OnFinished = Callable[[int, Completion], None]
"""(place among the requests, or number that `add` gave, what was sampled for it)."""

Decode = Callable[[Sequence[int]], str]

OnToken = Callable[[int, int, float], None]
"""(number that `add` gave, token, its log-prob)."""


@dataclass(frozen=True)
class TrainedPolicy:
    """The policy beside which a sampler is built."""

    module: nn.Module
    """The trainer's own, which a sampler may share."""
    is_whole: bool
    """Whether this rank holds all of its weights; else it is sharded."""
    dtype: torch.dtype
    """Of its parameters."""
    load: Callable[[torch.dtype], nn.Module]
    """Another module of the same model, in a precision of its own, with adapters merged."""
    shape: Callable[[torch.dtype], nn.Module]
    """The same without values, on the meta device."""
    timeout_s: float
    """How long ranks that sample together wait for each other."""


class Rollout(ABC):
    """Samples from a causal language model, which it may share with a trainer.

    The module's parameters change in `load_weights` alone. A caller that changes them from
    outside sets `version`, which completions carry.
    """

    traits = SamplerTraits()
    """What the sampler is, and which keys it takes."""
    restarts = 0
    """How often what it samples with was started anew."""
    leads = True
    """Of ranks that sample together, whether this is the one to ask; the others `follow`."""

    def __init__(self, config: RolloutConfig, module: nn.Module, device: torch.device) -> None:
        names = (name for name, traits in SAMPLERS.items() if traits is self.traits)
        self.name = next(names, config.sampler)
        """What messages call it."""
        check_taken(config, self.traits, self.name, KEY, trains=True)
        self.config = config
        self.module = module
        self.device = device
        self.version = 0
        self.decode: Decode | None = None
        """From tokens to text; only requests with stop strings need it."""

    @classmethod
    def beside(cls, policy: TrainedPolicy, config: RolloutConfig, device: torch.device) -> Rollout:
        """A sampler beside the trained policy: on its module where the sampler can share it, else
        on a module of its own, which `load_weights` keeps up to date."""
        if cls.traits.owns_weights or cls.shares(policy, config):
            return cls(config, policy.module, device)
        return cls(config, policy.load(cls.dtype_of(policy, config)).to(device), device)

    @classmethod
    def shares(cls, policy: TrainedPolicy, config: RolloutConfig) -> bool:
        """Whether it can sample with the policy's own module."""
        return policy.is_whole and cls.dtype_of(policy, config) == policy.dtype

    @staticmethod
    def dtype_of(policy: TrainedPolicy, config: RolloutConfig) -> torch.dtype:
        """Precision of the parameters that it samples with."""
        return policy.dtype if config.dtype is None else DTYPES[config.dtype]

    @abstractmethod
    def generate(
        self, requests: Sequence[Request], on_finished: OnFinished | None = None
    ) -> list[Completion]:
        """One completion a request, in the order of the requests.

        `on_finished` is called with each as soon as it ends, in whatever order that happens.
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

    def update(self, source: WeightSource, version: int) -> None:
        """Take over the newest weights of a trainer's engine."""
        self.load_weights(source.export_weights(), version)

    def expect(self, probe: Probe) -> None:  # noqa: B027 -- for those whose traits say `checks_weights`
        """The expected output of a probe with the newest weights."""

    def leading(self) -> AbstractContextManager[None]:
        """To be entered around all sampling of a phase; then the ranks that follow are released."""
        return nullcontext()

    def follow(self) -> None:  # noqa: B027 -- most have no ranks that follow
        """The work of a rank that does not lead while the first one samples."""

    def synchronize(self) -> None:  # noqa: B027 -- most sample alone
        """Wait until all ranks that sample together have the weights and gave back their memory."""

    def close(self) -> None:  # noqa: B027 -- most hold nothing but memory
        """Let go of what outlives this process: other processes, files, connections."""

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse requests that are too long for `rollout.max_model_len`, or cannot be served."""
        config = self.config
        longest = config.longest_sequence
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
            if request.params.stop and self.decode is None:
                raise RolloutError(
                    f"request {index} has stop={request.params.stop!r}: the sampler has no "
                    "function that decodes tokens"
                )
            self._check_params(request.params)

    def _check_params(self, params: SamplingParams) -> None:
        for name, neutral in NEUTRAL.items():
            value = getattr(params, name)
            if value not in neutral and name not in self.traits.takes:
                raise UnsupportedError(
                    f"sampling parameter {name}={value!r}: takes rollout.name={takers_of(name)}, "
                    f"not {self.name}"
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


class StepwiseRollout(Rollout):
    """A sampler that takes in requests at any time and works on all of them step by step.

    One thread alone uses it. `generate` is: add all, step until they have ended.
    """

    def __init__(self, config: RolloutConfig, module: nn.Module, device: torch.device) -> None:
        super().__init__(config, module, device)
        self._numbers = itertools.count()
        self._failures: dict[int, CalderaError] = {}

    def generate(
        self, requests: Sequence[Request], on_finished: OnFinished | None = None
    ) -> list[Completion]:
        if not requests:
            return []
        self.check(requests)
        completions: dict[int, Completion] = {}
        places: dict[int, int] = {}

        def finish(number: int, completion: Completion) -> None:
            completions[places[number]] = completion
            if on_finished is not None:
                on_finished(places[number], completion)

        places |= {number: place for place, number in enumerate(self._add_all(requests, finish))}
        with self.stepping():
            while len(completions) < len(requests):
                self.step()
                for error in self.take_failures().values():
                    raise error
        return [completions[place] for place in range(len(requests))]

    def _add_all(self, requests: Sequence[Request], on_finished: OnFinished) -> list[int]:
        return [self.add(request, None, on_finished) for request in requests]

    @abstractmethod
    def add(
        self,
        request: Request,
        on_token: OnToken | None = None,
        on_finished: OnFinished | None = None,
    ) -> int:
        """Take in a request; returns its number. The steps that follow call the callbacks."""

    @abstractmethod
    def stepping(self) -> AbstractContextManager[None]:
        """To be entered around any number of steps, in which the weights do not change."""

    @abstractmethod
    def step(self) -> None:
        """Sample the next tokens.

        When weights or version have changed since the last step, requests in flight go on with the
        new ones: what is cached of them is computed anew, what was sampled for them stays.
        """

    @abstractmethod
    def abort(self, number: int) -> Completion | None:
        """Drop a request; what it has by now, or None if it has ended already.

        Its `on_finished` is not called.
        """

    def take_failures(self) -> dict[int, CalderaError]:
        """Requests that have failed since the last call, each with its own reason, while
        the others go on. Such a request returns nothing else."""
        failures, self._failures = self._failures, {}
        return failures

    @abstractmethod
    def has_work(self) -> bool:
        """Whether any request has not ended, or has failed and was not reported."""


ROLLOUTS: Registry[type[Rollout]] = Registry(f"{KEY}.name")


def sampler_class(name: str, key: str = f"{KEY}.name") -> type[Rollout]:
    """The sampler of a registered name, or a custom one: my.module.MySampler, file.py:MySampler."""
    if name in ROLLOUTS or not set(name) & set(".:"):
        return ROLLOUTS[name]
    return load_class(name, Rollout, key)  # type: ignore[type-abstract]


# ---- Strings that end a completion

TOKENS_A_CHARACTER = 4
"""At most, of a tokenizer that falls back to the bytes of UTF-8."""


def window_of(stops: Sequence[str]) -> int:
    """How many of the last tokens can have a part in one of these strings."""
    return TOKENS_A_CHARACTER * (max(map(len, stops)) + 1)


def completes_a_stop(token_ids: Sequence[int], stops: Sequence[str], decode: Decode) -> bool:
    """Whether one of these strings is in the text of the last tokens.

    To be asked after each token, so that the newest one has completed it.
    """
    text = decode(token_ids[-window_of(stops) :])
    return any(stop in text for stop in stops)
