"""The agent loop `search_agent`: Search-R1's protocol of tags."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from caldera.agent_loop.base import (
    AgentLoopBase,
    AgentLoopOutput,
    ResponseTokens,
    ServerManager,
    register,
)
from caldera.agent_loop.output import DETAIL, TOOL
from caldera.config import PPOTrainerConfig
from caldera.data.loader import truncate
from caldera.errors import ConfigError
from caldera.tools.search import Document, RetrievalFailed, RetrieverClient

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# ---- The tags by which a policy searches and answers, and the environment's replies

STOPS = ("</search>", "</answer>")
"""A turn ends with one of these."""
TAGS = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class Action:
    """The action of the policy in a turn."""

    kind: Literal["search", "answer"]
    content: str


def read_action(text: str) -> Action | None:
    """The first action of a turn; None if there is none, or nothing stands in its tags."""
    match = TAGS.search(text)
    if match is None or not match[2].strip():
        return None
    return Action("search" if match[1] == "search" else "answer", match[2].strip())


def documents_text(documents: Sequence[Document]) -> str:
    """The passages that were found."""
    if not documents:
        return "No search results found."
    return "".join(
        f"Doc {number}(Title: {document.title}) {document.text}\n"
        for number, document in enumerate(documents, start=1)
    )


def observation(text: str, start_marker: str, end_marker: str) -> str:
    """The result of a search, as the policy reads it."""
    return f"\n\n{start_marker}{text}{end_marker}\n\n"


def invalid_text() -> str:
    """The environment's reply to a turn without an action."""
    return (
        "\nThat was no valid action. To search, write a query between <search> and </search>. "
        "To answer, write the answer between <answer> and </answer>. Try again.\n"
    )


# ---- One trajectory of the search agent: the policy generates, searches, reads, and answers


@dataclass
class SearchTrajectory(ResponseTokens):
    """The tokens after the prompt, and what the policy did."""

    actions: int = 0
    """Turns of the policy."""
    valid_actions: int = 0
    valid_searches: int = 0
    failed_searches: int = 0
    """Those to which the service gave no answer."""
    finished: bool = False
    """Whether it ended with an answer."""


class LLMGenerationManager:
    """Runs trajectories. What the policy sampled is never encoded again: a turn ends with the
    token that completes a closing tag, and what a search brings is put behind it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        client: RetrieverClient,
        config: PPOTrainerConfig,
    ) -> None:
        self._tokenizer = tokenizer
        self._client = client
        self._config = config

    @property
    def _most_tokens(self) -> int:
        """Of all turns together, the environment's included."""
        return self._config.actor_rollout_ref.rollout.response_length

    async def run_llm_loop(
        self, server: ServerManager, prompt_ids: Sequence[int], params: Mapping[str, Any]
    ) -> SearchTrajectory:
        """One trajectory from a prompt to an answer, or to a limit."""
        trajectory = SearchTrajectory()
        request_id = uuid.uuid4().hex
        for turn in range(self._config.max_turns + 1):  # in the last it can only answer
            can_search = turn < self._config.max_turns
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
        """The policy's turn; None if there is no room for one."""
        room = self._most_tokens - len(trajectory.response_ids)
        limits = {"max_tokens": min(self._config.data.max_response_length, room), "stop": STOPS}
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
        text, markers = invalid_text(), self._config.algorithm.state_masking
        if action is not None:
            found = await self._search(server, action.content, trajectory)
            text = observation(found, markers.start_state_marker, markers.end_state_marker)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        ids = ids[: self._config.data.max_obs_length]
        if len(trajectory.response_ids) + len(ids) >= self._most_tokens:
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


# ---- What search agents did in a batch, under Search-R1's names

ACTIONS, VALID, SEARCHES, FINISHED = (
    "search_actions",
    "search_valid_actions",
    "search_valid_searches",
    "search_finished",
)


def facts_of(trajectory: SearchTrajectory) -> dict[str, Any]:
    """The columns of a trajectory from which its metrics follow."""
    return {
        ACTIONS: trajectory.actions,
        VALID: trajectory.valid_actions,
        SEARCHES: trajectory.valid_searches,
        FINISHED: trajectory.finished,
    }


def search_metrics(
    facts: Sequence[Mapping[str, Any]], response_mask: Tensor, attention_mask: Tensor
) -> dict[str, float]:
    """The metrics of a batch, of which `facts` are the columns; none without a search agent.

    `response_mask` is 1 for tokens of the policy's own (B, R); `attention_mask` covers the prompts
    as well (B, P + R).
    """
    ours = [each for each in facts if ACTIONS in each]
    if not ours:
        return {}
    actions = [int(each[ACTIONS]) for each in ours]
    valid = sum(int(each[VALID]) for each in ours)
    in_loss = float(response_mask.sum())
    tokens = float(attention_mask[:, -response_mask.shape[1] :].sum())
    return {
        "env/number_of_actions/mean": sum(actions) / len(ours),
        "env/number_of_actions/max": float(max(actions)),
        "env/number_of_actions/min": float(min(actions)),
        "env/finish_ratio": sum(bool(each[FINISHED]) for each in ours) / len(ours),
        "env/number_of_valid_action": valid / len(ours),
        "env/ratio_of_valid_action": valid / max(1, sum(actions)),
        "env/number_of_valid_search": sum(int(each[SEARCHES]) for each in ours) / len(ours),
        "state_tokens/total": in_loss,
        "state_tokens/coverage": in_loss / max(1.0, tokens),
    }


@register("search_agent")
class SearchAgentLoop(AgentLoopBase):
    """The policy searches by `<search>`, reads `<information>`, and answers by `<answer>`."""

    @classmethod
    def check_run(cls, config: PPOTrainerConfig) -> None:
        retriever = config.retriever
        if not retriever.url:
            raise ConfigError(
                "retriever.url=null: the agent loop search_agent (agent_name of a row, or "
                "actor_rollout_ref.rollout.agent.default_agent_loop) needs the address of a "
                "retrieval service, such as http://127.0.0.1:8000/retrieve"
            )
        _client(retriever.url, retriever.topk)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        data, retriever = self.config.data, self.config.retriever
        ids = await self.apply_chat_template(list(row["raw_prompt"]))
        prompt_ids = truncate(ids, data.max_prompt_length, data.truncation)
        # The tasks of a process share its connections.
        client = _client(retriever.url, retriever.topk)
        manager = LLMGenerationManager(self.tokenizer, client, self.config)
        done = await manager.run_llm_loop(self.server_manager, prompt_ids, sampling_params)
        found = done.valid_searches - done.failed_searches
        calls = {"search/ok": found, "search/error": done.failed_searches}
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=done.response_ids,
            response_mask=done.response_mask,
            response_logprobs=done.response_logprobs,
            num_turns=2 * done.actions,  # each follows the prompt or an observation
            extra_fields=facts_of(done),
            tool_calls={name: count for name, count in calls.items() if count},
        )


@cache
def _client(url: str | None, topk: int) -> RetrieverClient:
    return RetrieverClient(url, topk)
