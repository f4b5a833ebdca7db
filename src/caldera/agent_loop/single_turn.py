"""The loop of one turn: the policy answers, and that is all."""

from __future__ import annotations

import uuid
from typing import Any

from caldera.agent_loop.base import AgentLoopBase, AgentLoopOutput, register
from caldera.data.padding import truncate

__all__ = ["SingleTurnAgentLoop"]


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """One answer to the prompt."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        data = self.config.data
        prompt_ids = await self.apply_chat_template(list(row["raw_prompt"]))
        prompt_ids = truncate(prompt_ids, data.max_prompt_length, data.truncation)
        answer = await self.server_manager.generate(uuid.uuid4().hex, prompt_ids, sampling_params)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=answer.token_ids,
            response_mask=[1] * len(answer.token_ids),
            response_logprobs=answer.log_probs,
            num_turns=2,
        )
