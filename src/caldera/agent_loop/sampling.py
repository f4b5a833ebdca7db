"""The turns of one trajectory, sampled among those of all others."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from caldera.agent_loop.base import AgentLoopBase, AgentLoopOutput, TokenOutput, register
from caldera.agent_loop.black_box import BatchServer, Session
from caldera.agent_loop.output import DETAIL, GENERATE, Timeline
from caldera.data.loader import truncate
from caldera.errors import RolloutError, UnsupportedError
from caldera.rollout import AsyncSampler, Request, SamplingParams
from caldera.seeds import derive_seed

NAMES = tuple(field.name for field in fields(SamplingParams))
OTHER_NAMES = {"max_new_tokens": "max_tokens"}
ALWAYS_THERE = "logprobs"
"""Loops ask for the log-probs of what is sampled by a boolean; they come in any case."""


class TrajectorySampler:
    """The `server_manager` of a loop.

    The seed of a turn follows from the row's and from the turn's number, so what is sampled does
    not depend on which trajectories run at the same time. The first turn has the row's own seed,
    hence a loop of one turn samples what is sampled without a loop.
    """

    def __init__(
        self,
        sampler: AsyncSampler,
        params: SamplingParams,
        seed: int,
        max_model_len: int,
        timeline: Timeline,
        server: BatchServer,
    ) -> None:
        """`params` hold what loops do not say; `max_tokens` of them is the most of any turn."""
        self._sampler = sampler
        self._params = params
        self._seed = seed
        self._max_model_len = max_model_len
        self._timeline = timeline
        self._server = server
        self._session = uuid.uuid4().hex
        self._turns = 0

    @property
    def timeline(self) -> Timeline:
        return self._timeline

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: object | None = None,
        video_data: object | None = None,
    ) -> TokenOutput:
        """The tokens that follow `prompt_ids`; see `ServerManager`."""
        if image_data or video_data:
            raise UnsupportedError("image_data and video_data: samplers take text only")
        turn, self._turns = self._turns, self._turns + 1
        params = self._params_of(sampling_params)
        room = min(params.max_tokens, self._max_model_len - len(prompt_ids))
        if room < 1:
            return TokenOutput([], [], "length")
        seed = derive_seed(self._seed, "turn", turn) if turn else self._seed
        params = replace(params, max_tokens=room)
        request = Request(list(prompt_ids), params, seed, self._session)
        with self._timeline.event(GENERATE, turn=turn) as event:
            sampled = await self._sampler.generate(request)
            event["tokens"] = len(sampled.token_ids)
            if self._timeline.is_detailed:
                event[DETAIL] = {
                    "prompt_ids": request.prompt_ids,
                    "token_ids": sampled.token_ids,
                    "log_probs": sampled.log_probs,
                    "weight_version": sampled.weight_version,
                }
        return TokenOutput(
            sampled.token_ids, sampled.log_probs, sampled.finish_reason, sampled.weight_version
        )

    def begin_session(self) -> Session:
        """See `ServerManager`."""
        return self._server.begin(self._seed)

    def _params_of(self, given: Mapping[str, Any]) -> SamplingParams:
        """Parameters of the loop that override the run's; stops of both end a turn."""
        changes: dict[str, Any] = {}
        for key, value in given.items():
            name = OTHER_NAMES.get(key, key)
            if name not in NAMES:
                raise RolloutError(
                    f"an agent loop asked for the sampling parameter {key!r}; "
                    f"there are {', '.join(NAMES)}"
                )
            if name == "stop":
                changes[name] = tuple(dict.fromkeys((*self._params.stop, *_texts(value))))
            elif name == "stop_token_ids":
                changes[name] = self._params.stop_token_ids | frozenset(value or ())
            elif name != ALWAYS_THERE or not isinstance(value, bool):
                changes[name] = value
        return replace(self._params, **changes)


def _texts(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


# ---- The loop of one turn: a single response of the policy


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """One response to the prompt."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        data = self.config.data
        prompt_ids = await self.apply_chat_template(list(row["raw_prompt"]))
        prompt_ids = truncate(prompt_ids, data.max_prompt_length, data.truncation)
        output = await self.server_manager.generate(uuid.uuid4().hex, prompt_ids, sampling_params)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            num_turns=2,
        )
