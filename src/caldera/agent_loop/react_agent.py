"""The loop that is a graph of LangGraph, whose chat model is the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from caldera.agent_loop.base import AgentLoopOutput, register
from caldera.agent_loop.tool_agent import State, ToolAgentLoop
from caldera.data.chat import Message
from caldera.data.loader import truncate
from caldera.errors import ConfigError
from caldera.installation import install_command
from caldera.tools.formats import ParsedCalls
from caldera.tools.running import ToolOutcome

if TYPE_CHECKING:
    from langgraph.graph.state import CompiledStateGraph

    from caldera.agent_loop.react_graph import RolloutChatModel
    from caldera.config import PPOTrainerConfig


class TrajectoryOver(Exception):
    """A limit is met: nothing more is sampled for this trajectory."""


@register("react_agent")
class ReactAgentLoop(ToolAgentLoop):
    """Runs a graph on a row's messages. What its model samples becomes the trajectory.

    This one has the graph in which the model calls the run's tools until it calls no more; a class
    that extends it has its own by `build_graph`.
    """

    takes_interactions: ClassVar[bool] = False

    @classmethod
    def check_run(cls, config: PPOTrainerConfig) -> None:
        try:
            import caldera.agent_loop.react_graph  # noqa: F401 -- is it there?
        except ModuleNotFoundError as error:
            raise ConfigError(
                "the agent loop react_agent (agent_name of a row, or "
                "actor_rollout_ref.rollout.agent.default_agent_loop) needs the libraries langgraph "
                f"and langchain-core ({error}): {install_command('langgraph')}"
            ) from error

    def build_graph(self, model: RolloutChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
        """A graph whose state has `messages`, to which it appends."""
        from caldera.agent_loop.react_graph import react_graph

        return react_graph(model, self)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        self.check_run(self.config)  # once more: only Caldera's data set is asked at the start
        from caldera.agent_loop.react_graph import RolloutChatModel, invoke

        self.trajectory = self._begin(row)
        self._sampling_params = sampling_params
        with suppress(TrajectoryOver):  # what there is of it is the trajectory
            await invoke(self.build_graph(RolloutChatModel(loop=self)), row["raw_prompt"])
        return self.trajectory.output()

    def _interaction(self, row: Mapping[str, Any]) -> None:
        """A graph is talked to by nobody else."""

    # ------------------------------------------------------------------ for the graph

    def tool_schemas(self) -> list[dict[str, Any]]:
        """The schemas of the run's tools for the model."""
        tools = self.equipment.tools
        return [] if tools is None else tools.schemas(self.trajectory.tools.tool_names)

    async def begin(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """Make the prompt."""
        data = self.config.data
        ids = await self.apply_chat_template(messages, tools)
        self.trajectory.prompt_ids = truncate(ids, data.max_prompt_length, data.truncation)
        self.trajectory.tools.messages[:] = messages

    def tell(self, messages: list[Message]) -> None:
        """Put messages behind what was sampled."""
        if self._answer(self.trajectory, messages) is State.TERMINATED:
            raise TrajectoryOver

    async def sample(self, finds_calls: bool) -> ParsedCalls:
        """Sample a response, and find the calls in it."""
        output = await self._sample(self.trajectory, self._sampling_params)
        if output is None:
            raise TrajectoryOver
        if not finds_calls:
            return ParsedCalls(self.trajectory.tools.messages[-1]["content"])
        return await self.equipment.parser.read(output.token_ids)

    async def call_tools(self, found: ParsedCalls) -> list[ToolOutcome]:
        """The outcomes of calls, and of what could not be read as one."""
        self.trajectory.calls, self.trajectory.problems = found.calls, found.problems
        outcomes = await self._outcomes(self.trajectory)
        self.trajectory.reward_calls(outcomes)
        return outcomes
