"""The policy inside of a LangGraph graph: the tokens are those that were sampled."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from caldera.agent_loop.base import AGENT_LOOPS, register
from caldera.agent_loop.manager import AgentLoops
from caldera.agent_loop.react_agent import ReactAgentLoop
from caldera.errors import ConfigError, RolloutError
from caldera.installation import install_command
from caldera.protocol import tensors_of
from caldera.rollout import NativeRollout, SamplingParams
from caldera.tools.formats import FunctionCall, ToolParser
from tests.unit.agent_loop import agent_scripts
from tests.unit.agent_loop.agent_scripts import CALL, equipment

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from caldera.config import PPOTrainerConfig
    from tests.unit.agent_loop.agent_scripts import Run

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


@pytest.mark.parametrize(
    ("texts", "overrides"),
    [
        ([f"{CALL}<eos>", "It is 42.<eos>"], []),
        ([f"hm  \n\n{CALL}  ", "42<eos>"], []),
        (["42<eos>"], []),
        (
            ['<tool_call>{"name": "add"</tool_call><eos>', "Sorry.<eos>"],
            ["data.max_response_length=600"],
        ),
        (['<tool_call>{"name": "no", "arguments": {}}</tool_call><eos>', "Sorry.<eos>"], []),
        ([f"{CALL}{CALL}<eos>", "42<eos>"], ["data.max_response_length=600"]),
        ([f"{CALL}<eos>"] * 3, [f"{MULTI_TURN}.max_assistant_turns=2"]),
        ([f"{CALL}<eos>"] * 3, [f"{MULTI_TURN}.max_user_turns=1"]),
        ([f"{CALL}<eos>", "42<eos>"], [f"data.max_response_length={len(CALL) + 5}"]),
        ([f"{CALL}<eos>", "It is 42.<eos>"], [f"data.max_response_length={len(CALL) + 9}"]),
    ],
    ids=[
        "call", "odd text", "no call", "malformed", "unknown tool", "two calls", "assistant turns",
        "user turns", "no room for the tool", "little room to answer",
    ],
)  # fmt: skip
def test_the_graph_gives_the_trajectory_of_the_tool_agent(
    run: Run, texts: list[str], overrides: list[str]
) -> None:
    output, script = run(*texts, overrides=overrides, loop="react_agent")
    expected, other = run(*texts, overrides=overrides)
    output.metrics = expected.metrics
    assert output == expected
    assert script.prompts == other.prompts


@pytest.mark.parametrize("arguments", ["{a", "[1]", "[" * 100_000])
def test_arguments_that_a_parser_left_unread_are_told(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    class Careless(ToolParser):
        async def extract_tool_calls(self, responses_ids: list[int]) -> Any:
            text = str(self.tokenizer.decode(responses_ids, skip_special_tokens=True))
            return text, [FunctionCall("add", arguments)] if text == "add" else []

    monkeypatch.setattr(agent_scripts, "Hermes", Careless)
    output, _ = run("add<eos>", "Sorry.<eos>", loop="react_agent")
    assert output.tool_calls == {"other/malformed": 1}


def test_tools_are_in_the_timeline(run: Run) -> None:
    _, script = run(f"{CALL}<eos>", "It is 42.<eos>", loop="react_agent")
    assert [event["kind"] for event in script.timeline.events] == ["generate", "tool", "generate"]
    assert script.timeline.events[1]["calls"][0]["status"] == "ok"


# ---------------------------------------------------------------------- custom graphs


@pytest.fixture
def own_loop(request: pytest.FixtureRequest) -> Any:
    """Registers a loop with a graph of its own under the test's name, for as long as it runs."""

    def add(build: Any) -> str:
        class OwnLoop(ReactAgentLoop):
            def build_graph(self, model: Any) -> Any:
                return build(model)

        name = request.node.name
        register(name)(OwnLoop)
        request.addfinalizer(lambda: AGENT_LOOPS._items.pop(name))
        return name

    return add


def test_a_graph_with_tools_and_messages_of_its_own(
    run: Run, tokenizer: PreTrainedTokenizerFast, own_loop: Any
) -> None:
    @tool
    def twice(x: int) -> str:
        """Twice a number."""
        return str(2 * x)

    def build(model: Any) -> Any:
        speaker = model.bind_tools([twice])

        async def speak(state: MessagesState) -> dict[str, Any]:
            asked = [SystemMessage("Be brief."), *state["messages"]]
            return {"messages": [await speaker.ainvoke(asked)]}

        def doubt(state: MessagesState) -> dict[str, Any]:
            return {"messages": [HumanMessage("Sure?")]}

        def after(state: MessagesState) -> str:
            last = state["messages"][-1]
            assert isinstance(last, AIMessage)
            if last.tool_calls:
                return "tools"
            return END if "Yes" in str(last.content) else "doubt"

        graph = StateGraph(MessagesState)
        graph.add_node("speak", speak)
        graph.add_node("doubt", doubt)
        graph.add_node("tools", ToolNode([twice]))
        graph.add_edge(START, "speak")
        graph.add_conditional_edges("speak", after, ["tools", "doubt", END])
        graph.add_edge("tools", "speak")
        graph.add_edge("doubt", "speak")
        return graph.compile()

    call = '<tool_call>{"name": "twice", "arguments": {"x": 21}}</tool_call>'
    output, _ = run(f"{call}<eos>", "42<eos>", "Yes<eos>", loop=own_loop(build))
    assert tokenizer.decode(output.prompt_ids) == (
        "<|s|>twice <eos><|s|>Be brief.<eos><|u|>20+22?<eos><|a|>"
    )
    assert tokenizer.decode(output.response_ids) == (
        f"{call}<eos><|t|>42<eos><|a|>42<eos><|u|>Sure?<eos><|a|>Yes<eos>"
    )
    sampled = [[1] * (len(call) + 1), [0] * 5, [1] * 3, [0] * 8, [1] * 4]
    assert output.response_mask == [mask for part in sampled for mask in part]
    assert output.tool_calls == {"twice/ok": 1}
    assert output.num_turns == 6


def test_a_graph_that_rewrites_the_past_is_refused(run: Run, own_loop: Any) -> None:
    def build(model: Any) -> Any:
        async def speak(state: MessagesState) -> dict[str, Any]:
            said = await model.ainvoke(state["messages"])
            said.content = "something else"
            again = await model.ainvoke([*state["messages"], said, HumanMessage("Sure?")])
            return {"messages": [again]}

        graph = StateGraph(MessagesState)
        graph.add_node("speak", speak)
        graph.add_edge(START, "speak")
        return graph.compile()

    with pytest.raises(RolloutError, match="may only append"):
        run("42<eos>", "43<eos>", loop=own_loop(build))


async def twice_at_once(model: Any, asked: Any) -> Any:
    sample = model.loop.sample

    async def sample_slowly(finds_calls: bool) -> Any:
        for _ in range(100):
            await asyncio.sleep(0)
        return await sample(finds_calls)

    model.loop.sample = sample_slowly
    return await model.abatch([asked, asked])


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda model, asked: model.invoke(asked), "ainvoke"),
        (twice_at_once, "at the same time"),
        (lambda model, asked: model.ainvoke(asked, temperature=0.5), "how it samples"),
        (lambda model, asked: model.ainvoke(asked, stop=["x"]), "how it samples"),
    ],
)
def test_the_model_is_asked_for_text_alone(run: Run, own_loop: Any, call: Any, told: str) -> None:
    def build(model: Any) -> Any:
        async def speak(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await call(model, state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("speak", speak)
        graph.add_edge(START, "speak")
        return graph.compile()

    with pytest.raises(RolloutError, match=told):
        run("42<eos>", loop=own_loop(build))


def test_a_graph_that_turns_in_circles_is_refused(run: Run, own_loop: Any) -> None:
    def build(model: Any) -> Any:
        graph = StateGraph(MessagesState)
        graph.add_node("idle", lambda state: {"messages": []})
        graph.add_edge(START, "idle")
        graph.add_edge("idle", "idle")
        return graph.compile()

    with pytest.raises(RolloutError, match="does not end"):
        run(loop=own_loop(build))


def test_without_langgraph_the_loop_says_what_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "langgraph.graph", None)
    monkeypatch.delitem(sys.modules, "caldera.agent_loop.react_graph", raising=False)
    with pytest.raises(ConfigError, match=re.escape(install_command("langgraph"))):
        run("42<eos>", loop="react_agent")


def test_a_real_model_samples_what_it_samples_without_the_graph(
    tokenizer: PreTrainedTokenizerFast,
    load: Callable[..., PPOTrainerConfig],
    tiny_model: Callable[..., PreTrainedModel],
) -> None:
    exact = "actor_rollout_ref.rollout.native.exact=True"
    config = load("data.max_prompt_length=24", "data.max_response_length=12", exact)
    model = tiny_model(vocab_size=len(tokenizer))
    rollout = NativeRollout(config.actor_rollout_ref.rollout, model, torch.device("cpu"))
    loops = AgentLoops(config, tokenizer, lambda _, used: equipment(used))
    params = SamplingParams(max_tokens=12, stop_token_ids=frozenset({2}))
    batches = []
    for name in ("tool_agent", "react_agent"):
        rows = [
            {"raw_prompt": [{"role": "user", "content": "ab"}], "uid": f"{n}", "agent_name": name}
            for n in range(8)
        ]
        batches.append(tensors_of(loops(rows, list(range(8)), rollout, params, 0, None)))
    for key in ("prompts", "responses", "response_mask", "rollout_log_probs"):
        assert torch.equal(batches[0][key], batches[1][key]), key
    assert len({tuple(row.tolist()) for row in batches[1]["responses"]}) > 4
