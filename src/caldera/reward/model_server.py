"""Reward models behind HTTP servers: the score function that asks one, and their addresses.

A classifier is asked with the conversation, in the words of its own chat template. A generative
model is asked by a custom score function, which gets the address.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from caldera.config.reward import RewardModelConfig
from caldera.data.chat import Message, tokenize_text
from caldera.data.conversation import (
    conversation_text,
    require_own_template,
    reward_model_tokenizer,
)
from caldera.errors import RewardError
from caldera.http_client import JsonClient, NoAnswer, Retries, Unavailable
from caldera.reward.scoring import ThreadScoring

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ATTEMPTS = 16
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0
SECONDS_TO_ANSWER = 120.0
MAX_IN_FLIGHT = 64


class RouterUrl(str):
    """The address of the run's own router, in place of the servers behind it."""


class RewardModelClient:
    """Asks a server for the score of a conversation. Threads may share it.

    `name` is the kind of server: `vllm` reads texts at /classify, `sglang` at /v1/embeddings;
    `native` reads tokens at /classify.
    """

    def __init__(
        self,
        url: str,
        name: str,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None = None,
    ) -> None:
        path = "/v1/embeddings" if name == "sglang" else "/classify"
        self.url = url.rstrip("/") + path
        self._name = name
        self._model = model
        self._tokenizer = tokenizer
        self._max_length = max_length
        # A run's own router is not beyond a proxy, whatever the environment has.
        self._client = JsonClient(by_proxy=not isinstance(url, RouterUrl))
        # Its threads do not keep the process from ending.
        self._requests = ThreadScoring(self._post, None, MAX_IN_FLIGHT)

    async def score(self, messages: list[Message], answer: str) -> float:
        """The model's verdict; raises RewardError once all attempts have failed."""
        body = json.dumps(self._request(messages, answer)).encode()
        retries = Retries(ATTEMPTS, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)

        async def attempt() -> float:
            sent = self._requests.submit({"body": body}, self.url)
            return self._read(await asyncio.wrap_future(sent))

        try:
            return await retries.run_async(attempt, (Unavailable, RewardError))
        except (NoAnswer, RewardError) as error:
            raise RewardError(f"no score from {self.url}: {error}") from error

    def _request(self, messages: list[Message], answer: str) -> dict[str, Any]:
        text = conversation_text(self._tokenizer, messages, answer)
        if self._name == "native":
            tokens = tokenize_text(self._tokenizer, text)[: self._max_length]
            return {"model": self._model, "input": tokens}
        # These servers tokenise as if for a plain text, with a token at its beginning.
        text = text.removeprefix(str(self._tokenizer.bos_token or ""))
        request = {"model": self._model, "input": text}
        # Releases of vLLM differ in the name.
        plain = {"activation": False, "use_activation": False}
        return request if self._name == "sglang" else request | plain

    def _post(self, body: bytes) -> Any:
        return self._client.post(self.url, body, SECONDS_TO_ANSWER)

    def _read(self, answer: Any) -> float:
        field = "embedding" if self._name == "sglang" else "probs"
        try:
            score = answer["data"][-1][field][-1]
        except (LookupError, TypeError) as error:
            raise RewardError(f"the answer has no data[-1].{field}[-1]: {answer!r:.200}") from error
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise RewardError(f"the score must be a number, and is {score!r:.200}")
        if not math.isfinite(score):
            raise RewardError(f"the score must be a finite number, and is {score!r}")
        return float(score)


@dataclass
class ServedScore:
    """The score function that asks the server at `reward_model.rollout.url`."""

    config: RewardModelConfig

    @functools.cached_property
    def client(self) -> RewardModelClient:
        config = self.config
        tokenizer = reward_model_tokenizer(config.model)
        require_own_template(tokenizer)
        name, path = str(config.rollout.name), str(config.model.path)
        return RewardModelClient(_url(config), name, path, tokenizer, config.max_length)

    async def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Any = None,
        *,
        raw_prompt: list[Message],
        **kwargs: Any,
    ) -> float:
        """The verdict of the model alone; it knows no ground truth."""
        return await self.client.score(raw_prompt, solution_str)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config,)


def served_score(config: RewardModelConfig) -> ServedScore:
    """The score function of a config; a mistake in the model's tokenizer is found at once."""
    score = ServedScore(config)
    assert score.client.url, "which is made here"
    return score


def server_arguments(config: RewardModelConfig) -> dict[str, Callable[[], Any]]:
    """Arguments that custom score functions and managers may take, each made when it is taken.

    Without a server both are None.
    """
    if not config.is_served:
        return {"reward_router_address": lambda: None, "reward_model_tokenizer": lambda: None}
    return {
        "reward_router_address": lambda: router_address(config),
        "reward_model_tokenizer": lambda: reward_model_tokenizer(config.model),
    }


def router_address(config: RewardModelConfig) -> str:
    """Where score functions find the server: host:port, or the whole URL if it has more parts."""
    url = _url(config)
    rest = url.removeprefix("http://").rstrip("/")
    return url if "/" in rest else rest


def _url(config: RewardModelConfig) -> str:
    url: str
    (url,) = config.rollout.url  # several stand behind a router
    return url
