"""A tiny random model with the chat template of a real one, behind a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from caldera.config import RolloutConfig
from caldera.rollout import AsyncSampler, Completion, NativeRollout, Request, Rollout
from caldera.serving import ChatModel, SessionServer

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = SPECIAL.index("<|im_end|>")
LONGEST = 768
VOCABULARY = 384


@cache
def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    """Of bytes, with the chat template of that name."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(["user assistant system tool_call arguments name " * 4], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=(TEMPLATES / f"{template}.jinja").read_text(),
    )  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A server, and how to ask it."""

    server: SessionServer
    rollout: Rollout
    sampler: AsyncSampler
    tokenizer: PreTrainedTokenizerFast

    def ask(
        self, path: str, body: Any = None, method: str | None = None, **headers: str
    ) -> httpx2.Response:
        content = body if isinstance(body, bytes | None) else None
        given = None if isinstance(body, bytes | None) else body
        return httpx2.request(
            method or ("GET" if body is None else "POST"), f"http://{self.server.address}{path}",
            content=content, json=given, headers=headers, timeout=60,
        )  # fmt: skip

    def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        reply = self.ask("/v1/chat/completions", {"messages": messages, **fields})
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def metric(self, name: str) -> float:
        lines = self.ask("/metrics").text.splitlines()
        (value,) = [line.split()[1] for line in lines if line.startswith(f"caldera_{name} ")]
        return float(value)


def chat_model(tokenizer: PreTrainedTokenizerFast) -> ChatModel:
    return ChatModel(
        name="tiny", tokenizer=tokenizer, vocabulary=len(tokenizer), stop_tokens=frozenset({END}),
        prompt_length=LONGEST - 1, response_length=LONGEST - 1, max_length=LONGEST,
    )  # fmt: skip


@contextmanager
def starting(tiny_model: Callable[..., Any]) -> Iterator[Callable[..., Served]]:
    """Starts servers, which end together."""
    running: list[Served] = []

    def start(
        template: str = "qwen2.5",
        rollout: Rollout | None = None,
        kind: type[Rollout] = NativeRollout,
        **options: Any,
    ) -> Served:
        tokenizer = tokenizer_with(template)
        if rollout is None:
            module = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=LONGEST)
            rollout = kind(config(), module, torch.device("cpu"))
        rollout.decode = chat_model(tokenizer).text
        sampler = AsyncSampler(rollout)
        server = SessionServer(sampler, chat_model(tokenizer), **options)
        running.append(Served(server, rollout, sampler, tokenizer))
        return running[-1]

    yield start
    for served in running:
        served.server.close(seconds=0)
        asyncio.run(served.sampler.close())


@pytest.fixture
def serve(tiny_model: Callable[..., Any]) -> Iterator[Callable[..., Served]]:
    """Starts a server with the template of that name, on the native sampler or another one."""
    with starting(tiny_model) as start:
        yield start


@pytest.fixture(scope="module")
def served(tiny_model: Callable[..., Any]) -> Iterator[Served]:
    """One server for many tests, which leave it as it is."""
    with starting(tiny_model) as start:
        yield start()


@pytest.fixture
def scripted(serve: Callable[..., Served]) -> Callable[..., Served]:
    """Starts a server whose model says these texts, one a request."""

    def start(texts: Sequence[str], template: str = "qwen2.5") -> Served:
        return serve(template, Scripted(tokenizer_with(template), texts))

    return start


def config() -> RolloutConfig:
    return RolloutConfig(
        prompt_length=LONGEST - 1, response_length=LONGEST - 1, max_model_len=LONGEST,
        max_num_seqs=32,
    )  # fmt: skip


class Scripted(Rollout):
    """Says the texts that it was given, one a request."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
        super().__init__(config(), torch.nn.Identity(), torch.device("cpu"))
        self._texts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def generate(self, requests: Sequence[Request], on_finished: Any = None) -> list[Completion]:
        completions = []
        for place in range(len(requests)):
            ids = [*self._texts.pop(0), END]
            completions.append(Completion(ids, [-0.5] * len(ids), "stop", self.version))
            if on_finished is not None:
                on_finished(place, completions[-1])
        return completions

    def wake_up(self, part: Any = None) -> None: ...

    def sleep(self) -> None: ...
