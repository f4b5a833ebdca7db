"""The loop in which the policy calls tools, is talked to by an interaction, or both."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from caldera.agent_loop.base import (
    AgentLoopBase,
    AgentLoopOutput,
    ResponseTokens,
    TokenOutput,
    register,
)
from caldera.agent_loop.output import DETAIL, TOOL, USER
from caldera.data.chat import Message
from caldera.data.loader import truncate
from caldera.errors import DataError
from caldera.interactions.base import Conversation
from caldera.tools.base import encodable
from caldera.tools.formats import FunctionCall
from caldera.tools.running import ToolOutcome, ToolState

if TYPE_CHECKING:
    from caldera.interactions.base import BaseInteraction

logger = logging.getLogger(__name__)


class State(Enum):
    """The next step of a trajectory."""

    PENDING = "the prompt is to be rendered"
    GENERATING = "the policy speaks"
    PROCESSING_TOOLS = "its calls are carried out"
    INTERACTING = "the interaction responds"
    TERMINATED = "nothing more"


@dataclass(kw_only=True)
class Trajectory(ResponseTokens):
    """A trajectory under way."""

    tools: ToolState
    prompt_ids: list[int] = field(default_factory=list)
    calls: Sequence[FunctionCall] = ()
    problems: Sequence[str] = ()
    """Calls of the last response, and errors of unreadable ones."""
    assistant_turns: int = 0
    user_turns: int = 0
    turn_scores: list[float] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    tool_calls: dict[str, int] = field(default_factory=dict)
    conversation: Conversation | None = None
    """With the row's interaction; None: there is none."""

    def count(self, calls: Mapping[str, int], prefix: str) -> None:
        """Add calls, by outcome, to those of `tool_calls`."""
        for outcome, number in calls.items():
            key = f"{prefix}/{outcome}"
            self.tool_calls[key] = self.tool_calls.get(key, 0) + number

    def reward_calls(self, outcomes: Sequence[ToolOutcome]) -> None:
        """Reward the last response for its calls, if any of them has a reward."""
        rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
        self.tool_rewards += rewards
        if rewards:
            self.reward_turn(sum(rewards))

    def reward_turn(self, reward: float) -> None:
        """Reward the last response, on its last token."""
        self.turn_rewards.append((len(self.response_ids) - 1, reward))

    def output(self) -> AgentLoopOutput:
        return AgentLoopOutput(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            response_mask=self.response_mask,
            response_logprobs=self.response_logprobs,
            num_turns=self.user_turns + self.assistant_turns + 1,
            extra_fields={"turn_scores": self.turn_scores, "tool_rewards": self.tool_rewards},
            turn_rewards=self.turn_rewards,
            tool_calls=self.tool_calls,
        )


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Goes from state to state until the policy neither calls nor is answered, or a limit is met.

    Sampled tokens are never encoded again: what follows a response is appended to it.
    """

    calls_tools = True
    takes_interactions = True

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        trajectory = self._begin(row)
        conversation = trajectory.conversation
        steps = {
            State.PENDING: self._pend,
            State.GENERATING: self._generate,
            State.PROCESSING_TOOLS: self._process_tools,
            State.INTERACTING: self._interact,
        }
        state = State.PENDING
        try:
            while state is not State.TERMINATED:
                state = await steps[state](trajectory, sampling_params)
        finally:
            if conversation is not None:
                await conversation.end()
        if conversation is not None:
            trajectory.count(conversation.failures, f"interaction.{conversation.interaction.name}")
        return trajectory.output()

    # ------------------------------------------------------------------ states

    async def _pend(self, trajectory: Trajectory, _params: dict[str, Any]) -> State:
        data, state = self.config.data, trajectory.tools
        tools = self.equipment.tools
        schemas = tools.schemas(state.tool_names) if tools is not None else ()
        ids = await self.apply_chat_template(state.messages, schemas)
        trajectory.prompt_ids = truncate(ids, data.max_prompt_length, data.truncation)
        if trajectory.conversation is not None and not await trajectory.conversation.begin():
            trajectory.conversation = None
        return State.GENERATING

    async def _sample(self, trajectory: Trajectory, params: dict[str, Any]) -> TokenOutput | None:
        """Add a response to the trajectory; None where nothing may follow it."""
        room = self.config.actor_rollout_ref.rollout.response_length - len(trajectory.response_ids)
        output = await self.server_manager.generate(
            trajectory.tools.request_id,
            trajectory.prompt_ids + trajectory.response_ids,
            params | {"max_tokens": min(room, params.get("max_tokens", room))},
        )
        trajectory.append(output.token_ids, output.log_probs)
        trajectory.assistant_turns += 1
        trajectory.tools.messages.append(self._message(output.token_ids))
        is_cut = not output.token_ids or output.stop_reason == "abort"
        return None if is_cut or self._is_over(trajectory) else output

    async def _generate(self, trajectory: Trajectory, params: dict[str, Any]) -> State:
        output = await self._sample(trajectory, params)
        if output is None:
            return State.TERMINATED
        if self.equipment.tools is not None:
            found = await self.equipment.parser.read(output.token_ids)
            trajectory.calls, trajectory.problems = found.calls, found.problems
            if found.calls or found.problems:
                return State.PROCESSING_TOOLS
        return State.INTERACTING if trajectory.conversation is not None else State.TERMINATED

    async def _process_tools(self, trajectory: Trajectory, _params: dict[str, Any]) -> State:
        outcomes = await self._outcomes(trajectory)
        trajectory.reward_calls(outcomes)
        return self._answer(trajectory, [{"role": "tool", "content": o.text} for o in outcomes])

    async def _interact(self, trajectory: Trajectory, _params: dict[str, Any]) -> State:
        assert trajectory.conversation is not None
        with self.server_manager.timeline.event(USER) as event:
            is_over, text, score = await trajectory.conversation.answer(trajectory.tools.messages)
            event["score"] = score
        if score is not None:
            trajectory.turn_scores.append(score)
            trajectory.reward_turn(score)
        if is_over:
            return State.TERMINATED
        return self._answer(trajectory, [{"role": "user", "content": encodable(text)}])

    # ------------------------------------------------------------------ parts of them

    def _begin(self, row: Mapping[str, Any]) -> Trajectory:
        extra_info = row.get("extra_info") or {}
        state = ToolState(
            request_id=uuid.uuid4().hex,
            messages=list(row["raw_prompt"]),
            tools_kwargs=row.get("tools_kwargs") or {},
            tool_names=extra_info.get("tool_selection"),
        )
        interaction = self._interaction(row)
        talk = None if interaction is None else Conversation(interaction, state.request_id, row)
        return Trajectory(tools=state, conversation=talk)

    def _interaction(self, row: Mapping[str, Any]) -> BaseInteraction | None:
        interactions = self.equipment.interactions
        if not interactions:
            return None
        name = str((row.get("interaction_kwargs") or {}).get("name"))
        if name not in interactions:
            raise DataError(
                f"extra_info.interaction_kwargs.name of a row is {name!r}; the interactions of "
                "actor_rollout_ref.rollout.multi_turn.interaction_config_path are "
                f"{', '.join(interactions)}"
            )
        return interactions[name]

    def _message(self, token_ids: list[int]) -> Message:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return {"role": "assistant", "content": str(text)}

    def _is_over(self, trajectory: Trajectory) -> bool:
        rollout = self.config.actor_rollout_ref.rollout
        limits = rollout.multi_turn
        return (
            len(trajectory.response_ids) >= rollout.response_length
            or _reached(trajectory.assistant_turns, limits.max_assistant_turns)
            or _reached(trajectory.user_turns, limits.max_user_turns)
        )

    async def _outcomes(self, trajectory: Trajectory) -> list[ToolOutcome]:
        tools = self.equipment.tools
        assert tools is not None
        with self.server_manager.timeline.event(TOOL) as event:
            outcomes = await tools.run(trajectory.calls, trajectory.tools)
            outcomes += [tools.malformed(problem) for problem in trajectory.problems]
            if self.server_manager.timeline.is_detailed:
                event[DETAIL] = {"arguments": [call.arguments for call in trajectory.calls]}
            event["calls"] = [
                {
                    "name": o.name,
                    "status": o.status,
                    "seconds": round(o.seconds, 4),
                    "metrics": o.metrics,
                }
                for o in outcomes
            ]
        for outcome in outcomes:
            # Names that a model makes up would each be a separate metric.
            name = outcome.name if outcome.name in tools.tools else "other"
            trajectory.count({outcome.status: 1}, name)
        return outcomes

    def _answer(self, trajectory: Trajectory, messages: list[Message]) -> State:
        """Append messages for the policy, unless they leave it no room to respond."""
        last_token = trajectory.response_ids[-1]
        ids = self.equipment.turns.continuation(messages, last_token)
        longest = self.config.actor_rollout_ref.rollout.response_length
        if len(trajectory.response_ids) + len(ids) >= longest:
            return State.TERMINATED
        trajectory.append(ids)
        trajectory.tools.messages += messages
        trajectory.user_turns += 1
        return State.GENERATING


def _reached(turns: int, most: int | None) -> bool:
    return most is not None and turns >= most
