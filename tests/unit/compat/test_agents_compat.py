"""Tools, interactions and agent loops as users of verl write them."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest
from verl._names import AGENTS

pytest.importorskip("caldera.agent_loop", reason="agent loops are not part of this release")

SCHEMA = {
    "type": "function",
    "function": {
        "name": "double",
        "description": "Twice a number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "which"}},
            "required": ["number"],
        },
    },
}


@pytest.mark.parametrize("module", sorted(AGENTS))
def test_every_name_leads_somewhere(module: str) -> None:
    imported = importlib.import_module(module)
    for name in AGENTS[module]:
        assert getattr(imported, name) is not None


def test_a_tool() -> None:
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

    class Double(BaseTool):
        def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
            super().__init__(config, tool_schema)

        async def execute(
            self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
        ) -> tuple[Any, float, dict[str, Any]]:
            return ToolResponse(text=str(2 * parameters["number"])), 0.5, {}

    async def call() -> tuple[str, float]:
        tool = Double({"type": "native"}, OpenAIFunctionToolSchema.model_validate(SCHEMA))
        assert tool.name == "double"
        instance, _ = await tool.create()
        response, reward, _ = await tool.execute(instance, {"number": 4})
        await tool.release(instance)
        return response.text, reward

    assert asyncio.run(call()) == ("8", 0.5)


def test_a_parser_of_calls() -> None:
    from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

    @ToolParser.register("compat_format")
    class Mine(ToolParser):
        async def extract_tool_calls(self, responses_ids: list[int]) -> tuple[str, list[Any]]:
            return "", [FunctionCall(name="double", arguments=f'{{"number": {responses_ids[0]}}}')]

    parsers = importlib.import_module("caldera.tools.formats").TOOL_PARSERS
    assert parsers["compat_format"] is Mine
    found = asyncio.run(parsers["compat_format"](None).read([4]))
    assert [(call.name, call.arguments) for call in found.calls] == [("double", '{"number": 4}')]


def test_an_interaction() -> None:
    from verl.interactions.base import BaseInteraction

    class Patient(BaseInteraction):
        async def generate_response(
            self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
        ) -> tuple[bool, str, float, dict[str, Any]]:
            return len(messages) > 2, "Again.", 0.25, {}

    async def talk() -> Any:
        interaction = Patient({"name": "patient"})
        instance = await interaction.start_interaction()
        return await interaction.generate_response(instance, [{"role": "user", "content": "1"}])

    assert asyncio.run(talk()) == (False, "Again.", 0.25, {})


def test_an_agent_loop() -> None:
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

    @register("compat_agent")
    class Mine(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            return AgentLoopOutput(
                prompt_ids=[1], response_ids=[2], response_mask=[1], num_turns=2, metrics={}
            )

    assert "compat_agent" in importlib.import_module("caldera.agent_loop.base").AGENT_LOOPS
    output = asyncio.run(Mine.run(None, {}))
    assert (output.response_ids, output.response_mask, output.num_turns) == ([2], [1], 2)
