"""The policy as LangChain's chat model, and the graph of ReAct.

The one file that needs `langgraph` and `langchain-core` (extra `langgraph`).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    InvalidToolCall,
    ToolCall,
    ToolMessage,
    convert_to_messages,
    convert_to_openai_messages,
)
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from pydantic import PrivateAttr

from caldera.data.chat import Message
from caldera.errors import RolloutError
from caldera.tools.formats import FunctionCall, ParsedCalls
from caldera.tools.running import ToolOutcome

if TYPE_CHECKING:
    from caldera.agent_loop.react_agent import ReactAgentLoop

MOST_STEPS = 1000
"""Of a graph that turns in circles without sampling; what samples ends by itself."""


class RolloutChatModel(BaseChatModel):
    """The policy, in one trajectory.

    Its samples are kept as they are. So a graph may append to the conversation; one that
    changes what was said before is refused.
    """

    loop: Any
    """The `ReactAgentLoop` that runs the trajectory."""
    _seen: list[tuple[str, str]] = PrivateAttr(default_factory=list)
    _is_speaking: bool = PrivateAttr(default=False)

    @property
    def _llm_type(self) -> str:
        return "caldera"

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        **kwargs: Any,
    ) -> Runnable[Any, AIMessage]:
        """The model, bound to these tools."""
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        tools = kwargs.pop("tools", [])
        if stop or kwargs:
            raise RolloutError(
                f"a graph of react_agent asked its model for {stop=} and {kwargs}: how it samples "
                "is decided by actor_rollout_ref.rollout"
            )
        if self._is_speaking:
            raise RolloutError("a graph of react_agent asked its model twice at the same time")
        self._is_speaking = True
        try:
            response = await self._speak(messages, tools)
        finally:
            self._is_speaking = False
        return ChatResult(generations=[ChatGeneration(message=response)])

    async def _speak(self, messages: list[BaseMessage], tools: list[dict[str, Any]]) -> AIMessage:
        if not self._seen:
            await self.loop.begin(_plain(messages), tools)
        else:
            new = self._new(messages)
            self.loop.tell(_plain(new))
            self._count(new)
        response = _message(await self.loop.sample(bool(tools)))
        self._seen = [_said(message) for message in [*messages, response]]
        return response

    def _new(self, messages: list[BaseMessage]) -> list[BaseMessage]:
        """The messages since the model's last turn."""
        count = len(self._seen)
        for place, (before, now) in enumerate(zip(self._seen, messages, strict=False)):
            if before != _said(now):
                raise _changed(f"message {place} was {before}, and is {_said(now)}")
        if len(messages) <= count:
            raise _changed(f"there were {count} messages, and there are {len(messages)}")
        return messages[count:]

    def _count(self, messages: list[BaseMessage]) -> None:
        """Calls of tools that the graph brought along; the run's own are counted already."""
        calls: dict[str, int] = self.loop.trajectory.tool_calls
        for message in messages:
            if isinstance(message, ToolMessage) and not isinstance(message.artifact, ToolOutcome):
                status = "error" if message.status == "error" else "ok"
                key = f"{message.name or 'other'}/{status}"
                calls[key] = calls.get(key, 0) + 1

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> NoReturn:
        raise RolloutError("a graph of react_agent must call its model by `await model.ainvoke`")


def _changed(how: str) -> RolloutError:
    return RolloutError(
        f"a graph of react_agent changed what was said before: {how}. Sampled tokens stay as they "
        "were sampled; a graph may only append messages"
    )


def _said(message: BaseMessage) -> tuple[str, str]:
    return message.type, str(message.content)


def _plain(messages: Sequence[BaseMessage]) -> list[Message]:
    """As chat templates take them."""
    return [
        {"role": "tool", "content": str(message.content)}
        if isinstance(message, ToolMessage)
        else dict(convert_to_openai_messages([message])[0])
        for message in messages
    ]


def _message(found: ParsedCalls) -> AIMessage:
    calls: list[ToolCall] = []
    problems: list[str] = []
    for call in found.calls:
        arguments = _arguments(call)
        if arguments is None:
            problems.append(f"the arguments of {call.name} must be a JSON object")
        else:
            calls.append(ToolCall(name=call.name, args=arguments, id=uuid.uuid4().hex))
    return AIMessage(
        found.content,
        id=uuid.uuid4().hex,
        tool_calls=calls,
        invalid_tool_calls=[
            InvalidToolCall(
                type="invalid_tool_call", name=None, args=None, id=uuid.uuid4().hex, error=problem
            )
            for problem in [*problems, *found.problems]
        ],
    )


def _arguments(call: FunctionCall) -> dict[str, Any] | None:
    """Those of a call, which a parser of the user's own may have left as the model wrote them."""
    try:
        read = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


# ---------------------------------------------------------------------- the graph


def react_graph(
    model: RolloutChatModel, loop: ReactAgentLoop
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The model speaks, its calls are carried out, and so on until it calls nothing."""
    schemas = loop.tool_schemas()
    speaker = model.bind_tools(schemas) if schemas else model

    async def speak(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await speaker.ainvoke(state["messages"])]}

    async def call(state: MessagesState) -> dict[str, Any]:
        said = state["messages"][-1]
        assert isinstance(said, AIMessage)
        found = ParsedCalls(
            str(said.content),
            [FunctionCall(one["name"], json.dumps(one["args"])) for one in said.tool_calls],
            [one["error"] or "" for one in said.invalid_tool_calls],
        )
        identifiers = [one["id"] for one in [*said.tool_calls, *said.invalid_tool_calls]]
        outcomes = await loop.call_tools(found)
        return {
            "messages": [
                ToolMessage(
                    outcome.text,
                    tool_call_id=identifier,
                    name=outcome.name,
                    artifact=outcome,
                    status="success" if outcome.status == "ok" else "error",
                )
                for outcome, identifier in zip(outcomes, identifiers, strict=True)
            ]
        }

    def next_node(state: MessagesState) -> str:
        said = state["messages"][-1]
        assert isinstance(said, AIMessage)
        return "tools" if said.tool_calls or said.invalid_tool_calls else END

    graph = StateGraph(MessagesState)
    graph.add_node("agent", speak)
    graph.add_node("tools", call)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", next_node, ["tools", END])
    graph.add_edge("tools", "agent")
    return graph.compile()


async def invoke(
    graph: CompiledStateGraph[Any, Any, Any, Any], messages: Sequence[Message]
) -> None:
    """Run a graph on the messages of a row."""
    state = {"messages": convert_to_messages(list(messages))}
    try:
        await graph.ainvoke(state, {"recursion_limit": MOST_STEPS})
    except GraphRecursionError as error:
        raise RolloutError(f"a graph of react_agent does not end: {error}") from error
