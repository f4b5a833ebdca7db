"""The run's own judge: a language model that sleeps while it is not needed, behind HTTP.

It speaks the protocol of OpenAI, as a remote judge does (`serving/server.py`). At temperature 0
responses are the most likely ones; else the request's `seed` decides, or, without one, its prompt.
"""

from __future__ import annotations

import asyncio

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from caldera.config.reward import RewardModelConfig
from caldera.config.rollout import sampler_config
from caldera.models.forward import base_module
from caldera.rollout import AsyncSampler, NativeRollout, Rollout
from caldera.serving import ChatModel, SessionServer
from caldera.workers.building import stop_tokens

ASLEEP = "the reward model sleeps"


class ChatServer:
    """Serves a model that is awake; while it sleeps, requests are turned away."""

    def __init__(self, rollout: Rollout, model: ChatModel, host: str) -> None:
        rollout.decode = model.text
        self._rollout = rollout
        self._sampler = AsyncSampler(rollout)
        self._server = SessionServer(self._sampler, model, host, seed=None)
        self.address = self._server.address

    def wake(self) -> None:
        self._rollout.wake_up()
        asyncio.run(self._sampler.resume())
        self._server.accept()

    def sleep(self) -> None:
        """When this returns the model is not in use, and its cache is free."""
        self._server.turn_away(ASLEEP)
        asyncio.run(self._give_up())
        self._rollout.sleep()

    async def _give_up(self) -> None:
        await self._sampler.pause()
        await self._sampler.abort()

    def close(self) -> None:
        self._server.turn_away(ASLEEP)
        asyncio.run(self._give_up())
        self._server.close()
        asyncio.run(self._sampler.close())


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
    rollout = sampler_config(
        keys,
        prompt_length=keys.prompt_length,
        response_length=keys.response_length,
        max_model_len=most,
        logprobs_mode="raw_logprobs",
    )
    model = ChatModel(
        name=str(config.model.path),
        tokenizer=tokenizer,
        vocabulary=hugging_face.vocab_size,
        stop_tokens=frozenset(stop_tokens(module, tokenizer.eos_token_id)),
        prompt_length=keys.prompt_length,
        response_length=keys.response_length,
        max_length=most,
        answers_to_any_name=True,
    )
    return ChatServer(NativeRollout(rollout, module, device), model, host)
