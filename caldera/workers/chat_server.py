"""A language model behind HTTP, as judges elsewhere are: the protocol of OpenAI.

    POST /v1/chat/completions  {"messages": [...], ...} -> choices[i].message.content, usage
    POST /v1/completions       {"prompt": ..., ...}     -> choices[i].text, usage
    GET  /v1/models            the one that there is
    GET  /health               200; 503 while the model sleeps

Answers come whole. At temperature 0 they are the most likely ones; else the request's `seed`
decides, or, if it has none, its prompt.
"""

from __future__ import annotations

import asyncio

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from caldera.config import RolloutConfig
from caldera.config.reward import RewardModelConfig
from caldera.errors import DataError, RolloutError
from caldera.models.forward import base_module
from caldera.rollout import AsyncSampler, Completion, NativeRollout, Rollout
from caldera.rollout import Request as Sample
from caldera.workers.building import stop_tokens
from caldera.workers.chat_protocol import CHAT, TEXT, ChatModel, answer, read
from caldera.workers.http_server import HttpServer, Reply, Request, error_reply, json_reply
from caldera.workers.reward_server import Asleep

PATHS = (CHAT, TEXT)


class ChatServer:
    """Serves a model that is awake; while it sleeps, requests are turned away."""

    def __init__(self, rollout: Rollout, model: ChatModel, host: str) -> None:
        rollout.decode = model.text
        self._rollout = rollout
        self._model = model
        self._awake = True
        self._sampler = AsyncSampler(rollout)
        self._http = HttpServer(self._handle, host)
        self.address = self._http.address

    def wake(self) -> None:
        self._rollout.wake_up()
        asyncio.run(self._sampler.resume())
        self._awake = True

    def sleep(self) -> None:
        """When this returns the model is not in use, and its cache is free."""
        self._awake = False
        asyncio.run(self._give_up())
        self._rollout.sleep()

    async def _give_up(self) -> None:
        await self._sampler.pause()
        await self._sampler.abort()

    def close(self) -> None:
        self._awake = False
        asyncio.run(self._give_up())
        self._http.close()
        asyncio.run(self._sampler.close())

    async def _handle(self, request: Request) -> Reply:
        path = request.path.partition("?")[0]
        if path == "/health" and request.method == "GET":
            return json_reply({}) if self._awake else _asleep()
        if path == "/v1/models" and request.method == "GET":
            return json_reply({"object": "list", "data": [self._description()]})
        if path not in PATHS or request.method != "POST":
            return error_reply(404, f"{request.method} {path}: POST {' or '.join(PATHS)}")
        try:
            asked = read(path, request.body, self._model)
            samples = [self._complete(sample) for sample in asked.samples]
            completions = await asyncio.gather(*samples)
        except DataError as error:
            return error_reply(400, str(error))
        except Asleep:
            return _asleep()
        except RolloutError as error:
            return error_reply(500, str(error))
        return json_reply(answer(path, asked, completions, self._model))

    async def _complete(self, sample: Sample) -> Completion:
        if not self._awake:
            raise Asleep("the reward model sleeps")
        completion = await self._sampler.generate(sample)
        if completion.finish_reason == "abort":
            raise Asleep("the reward model fell asleep")
        return completion

    def _description(self) -> dict[str, object]:
        return {
            "id": self._model.name, "object": "model", "created": 0, "owned_by": "caldera",
            "max_model_len": self._model.max_length,
        }  # fmt: skip


def serve_language_model(
    module: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    config: RewardModelConfig,
    device: torch.device,
    host: str,
) -> ChatServer:
    """A server on that address, with the native sampler on the module."""
    keys, hugging_face = config.rollout, base_module(module).config
    most = keys.max_model_len or keys.prompt_length + keys.response_length
    most = min(most, getattr(hugging_face, "max_position_embeddings", most))
    rollout = RolloutConfig(
        name="native",
        prompt_length=keys.prompt_length,
        response_length=keys.response_length,
        max_model_len=most,
        max_num_seqs=keys.max_num_seqs,
        max_num_batched_tokens=keys.max_num_batched_tokens,
        gpu_memory_utilization=keys.gpu_memory_utilization,
        enable_chunked_prefill=keys.enable_chunked_prefill,
        enable_prefix_caching=keys.enable_prefix_caching,
        logprobs_mode="raw_logprobs",
        dtype=keys.dtype,
    )
    model = ChatModel(
        name=str(config.model.path),
        tokenizer=tokenizer,
        vocabulary=hugging_face.vocab_size,
        stop_tokens=frozenset(stop_tokens(module, tokenizer.eos_token_id)),
        prompt_length=keys.prompt_length,
        response_length=keys.response_length,
        max_length=most,
    )
    return ChatServer(NativeRollout(rollout, module, device), model, host)


def _asleep() -> Reply:
    return error_reply(503, "the reward model sleeps")
