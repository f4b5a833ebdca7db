"""One trajectory of the search agent: the policy speaks, searches, reads, and answers."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from caldera.agent_loop.base import ServerManager
from caldera.agent_loop.timeline import DETAIL, TOOL
from caldera.search_agent.protocol import (
    STOPS,
    Action,
    documents_text,
    invalid_text,
    observation,
    read_action,
)
from caldera.tools.retrieval import RetrievalFailed, RetrieverClient

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["LLMGenerationManager", "SearchSettings", "SearchTrajectory"]


@dataclass(frozen=True)
class SearchSettings:
    """The limits of a trajectory, in tokens but for the turns."""

    max_turns: int
    """Turns in which the policy may search; one more follows, in which it can only answer."""
    max_answer_length: int
    """Of what it says in one turn."""
    max_obs_length: int
    """Of what it is told in between."""
    max_response_length: int
    """Of all turns together, with what it is told."""
    start_marker: str = "<information>"
    end_marker: str = "</information>"


@dataclass
class SearchTrajectory:
    """The tokens after the prompt, and what the policy did."""

    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] = field(default_factory=list)
    actions: int = 0
    """Turns of the policy."""
    valid_actions: int = 0
    valid_searches: int = 0
    failed_searches: int = 0
    """Those to which the service gave no answer."""
    finished: bool = False
    """Whether it ended with an answer."""

    def append(self, ids: Sequence[int], log_probs: Sequence[float] | None = None) -> None:
        """Put tokens behind the others; those without log-probs are not the policy's."""
        self.response_ids += ids
        self.response_mask += [int(log_probs is not None)] * len(ids)
        self.response_logprobs += [0.0] * len(ids) if log_probs is None else log_probs


class LLMGenerationManager:
    """Runs trajectories. What the policy sampled is never encoded again: a turn ends with the
    token that completes a closing tag, and what a search brings is put behind it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        client: RetrieverClient,
        settings: SearchSettings,
    ) -> None:
        self._tokenizer = tokenizer
        self._client = client
        self._settings = settings

    async def run_llm_loop(
        self, server: ServerManager, prompt_ids: Sequence[int], params: Mapping[str, Any]
    ) -> SearchTrajectory:
        """One trajectory from a prompt to an answer, or to a limit."""
        trajectory = SearchTrajectory()
        request_id = uuid.uuid4().hex
        for turn in range(self._settings.max_turns + 1):
            can_search = turn < self._settings.max_turns
            text = await self._speak(server, request_id, prompt_ids, params, trajectory)
            action = None if text is None else read_action(text)
            if action is not None and (can_search or action.kind == "answer"):
                trajectory.valid_actions += 1
            if action is not None and action.kind == "answer":
                trajectory.finished = True
                break
            if text is None or not can_search or not await self._tell(server, action, trajectory):
                break
        return trajectory

    async def _speak(
        self,
        server: ServerManager,
        request_id: str,
        prompt_ids: Sequence[int],
        params: Mapping[str, Any],
        trajectory: SearchTrajectory,
    ) -> str | None:
        """What the policy says; None if there is no room for it to say anything."""
        settings = self._settings
        room = settings.max_response_length - len(trajectory.response_ids)
        limits = {"max_tokens": min(settings.max_answer_length, room), "stop": STOPS}
        context = [*prompt_ids, *trajectory.response_ids]
        answer = await server.generate(request_id, context, {**params, **limits})
        if not answer.token_ids or answer.stop_reason == "abort":
            return None
        trajectory.append(answer.token_ids, answer.log_probs)
        trajectory.actions += 1
        # Tags may be special tokens of the tokenizer.
        return str(self._tokenizer.decode(answer.token_ids, skip_special_tokens=False))

    async def _tell(
        self, server: ServerManager, action: Action | None, trajectory: SearchTrajectory
    ) -> bool:
        """Put an observation behind what was said; False if there is no room to go on."""
        settings = self._settings
        text = invalid_text()
        if action is not None:
            found = await self._search(server, action.content, trajectory)
            text = observation(found, settings.start_marker, settings.end_marker)
        ids = self._tokenizer.encode(text, add_special_tokens=False)[: settings.max_obs_length]
        if len(trajectory.response_ids) + len(ids) >= settings.max_response_length:
            return False
        trajectory.append(ids)
        return True

    async def _search(self, server: ServerManager, query: str, trajectory: SearchTrajectory) -> str:
        trajectory.valid_searches += 1
        with server.timeline.event(TOOL) as event:
            call = {"name": "search", "status": "ok"}
            event["calls"] = [call]
            if server.timeline.is_detailed:
                event[DETAIL] = {"arguments": [query]}
            try:
                (documents,) = await self._client.search([query])
            except RetrievalFailed as error:
                call["status"] = "error"
                trajectory.failed_searches += 1
                return f"The search failed: {error}"
        return documents_text(documents)
