"""The agent loop `search_agent`: Search-R1's protocol of tags."""

from __future__ import annotations

from functools import cache
from typing import Any

from caldera.agent_loop.base import AgentLoopBase, AgentLoopOutput, register
from caldera.config import PPOTrainerConfig
from caldera.data.padding import truncate
from caldera.errors import ConfigError
from caldera.search_agent.generation import LLMGenerationManager, SearchSettings
from caldera.search_agent.metrics import facts_of
from caldera.tools.retrieval import RetrieverClient

__all__ = ["SearchAgentLoop"]


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
        manager = LLMGenerationManager(self.tokenizer, client, search_settings(self.config))
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


def search_settings(config: PPOTrainerConfig) -> SearchSettings:
    """The limits that a config sets."""
    markers = config.algorithm.state_masking
    return SearchSettings(
        max_turns=config.max_turns,
        max_answer_length=config.data.max_response_length,
        max_obs_length=config.data.max_obs_length,
        max_response_length=config.actor_rollout_ref.rollout.response_length,
        start_marker=markers.start_state_marker,
        end_marker=markers.end_state_marker,
    )


@cache
def _client(url: str | None, topk: int) -> RetrieverClient:
    return RetrieverClient(url, topk)
