from __future__ import annotations

import asyncio
import json
import threading
from typing import Any, Literal

import pytest

from caldera.errors import ConfigError
from caldera.tools import ToolResponse, function_tool
from caldera.tools.formats import FunctionCall
from caldera.tools.function_tool import MARK, schema_of
from caldera.tools.running import ToolRunner, ToolState


def weather(
    city: str,
    days: int = 1,
    unit: Literal["C", "F"] = "C",
    places: list[str] | None = None,
    exact: float | str = 0.5,
    agent_data: Any = None,
) -> str:
    """The weather of the next days.

    It is made up.

    Args:
        city: Where; for example: Oslo,
            or any other.
        days (int): How many.

    Returns:
        What it will be.
    """
    return f"{city}: {days} days of rain"


def call(function: Any, **arguments: Any) -> Any:
    tool = getattr(function, MARK)
    return asyncio.run(tool.execute("id", arguments, agent_data=ToolState(request_id="r")))


def test_the_schema_comes_from_hints_and_docstring() -> None:
    assert schema_of(weather).model_dump()["function"] == {
        "name": "weather",
        "description": "The weather of the next days.\n\nIt is made up.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {
                    "type": "string",
                    "description": "Where; for example: Oslo, or any other.",
                },
                "days": {"type": "integer", "description": "How many."},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "places": {"type": "array", "items": {"type": "string"}, "nullable": True},
                "exact": {"anyOf": [{"type": "number"}, {"type": "string"}]},
            },
            "required": ["city"],
        },
    }


def variadic(*cities: str) -> str: ...
def keywords(**cities: str) -> str: ...
def unhinted(city) -> str: ...  # type: ignore[no-untyped-def]  # which is refused
def strange(city: set[str]) -> str: ...
def misnamed(city: str) -> str:
    """Looks.

    Args:
        town: Where.
    """
    ...


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (variadic, "cannot be called by name"),
        (keywords, "cannot be called by name"),
        (unhinted, "city needs a type hint"),
        (strange, "a model cannot write"),
        (misnamed, "'town'"),
    ],
)
def test_functions_that_cannot_be_tools(function: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        function_tool(function)


@pytest.mark.parametrize(
    ("result", "text", "reward", "metrics"),
    [
        ("rain", "rain", None, {}),
        ({"a": "é"}, '{"a": "é"}', None, {}),
        (ToolResponse("fog"), "fog", None, {}),
        (3, "3", None, {}),
        (("rain", 0.5), "rain", 0.5, {}),
        (({"a": 1}, 0.5, {"b": 2}), '{"a": 1}', 0.5, {"b": 2}),
        ((1, 2, 3, 4), "(1, 2, 3, 4)", None, {}),
    ],
)
def test_what_functions_may_return(
    result: Any, text: str, reward: float | None, metrics: dict[str, Any]
) -> None:
    @function_tool
    def give() -> Any:
        return result

    response, got, measured = call(give)
    assert (response.text, got, measured) == (text, reward, metrics)


def test_a_function_stays_callable_and_has_the_name_and_limits_that_are_given() -> None:
    named = function_tool("forecast", timeout=3, attempts=2)(weather)
    assert named is weather and weather("Oslo") == "Oslo: 1 days of rain"
    tool = getattr(weather, MARK)
    assert tool.name == "forecast"
    assert (tool.limits.timeout, tool.limits.attempts) == (3, 2)
    with pytest.raises(ConfigError, match="no option 'timout'"):
        function_tool(timout=3)(variadic)


def test_a_schema_of_ones_own() -> None:
    schema = {"type": "function", "function": {"name": "any", "parameters": None}}
    tool = getattr(function_tool("any", schema=schema)(lambda: "x"), MARK)
    assert tool.schema.model_dump()["function"]["parameters"]["properties"] == {}
    with pytest.raises(ConfigError, match="'other'"):
        function_tool("other", schema=schema)(lambda: "x")


def test_blocking_functions_run_beside_each_other_and_see_the_trajectory() -> None:
    both = threading.Barrier(2, timeout=30)

    @function_tool
    def meet(agent_data: Any) -> str:
        both.wait()  # only returns if two are here at the same time
        return str(agent_data.request_id)

    async def twice() -> Any:
        tool = getattr(meet, MARK)
        state = ToolState(request_id="r1")
        return await asyncio.gather(*(tool.execute("", {}, agent_data=state) for _ in range(2)))

    assert [response.text for response, _, _ in asyncio.run(twice())] == ["r1", "r1"]


def test_an_async_function_runs_in_the_event_loop() -> None:
    @function_tool
    async def where() -> str:
        return threading.current_thread().name

    assert call(where)[0].text == threading.current_thread().name


def test_null_is_taken_where_the_hint_has_none() -> None:
    @function_tool
    def stock(fruit: str | None = None, *, most: int = 3) -> str:
        return f"{fruit} {most}"

    runner = ToolRunner([getattr(stock, MARK)], max_parallel_calls=2)
    calls = [FunctionCall("stock", json.dumps({name: None})) for name in ("fruit", "most")]
    taken, refused = asyncio.run(runner.run(calls, ToolState()))
    assert taken.text == "None 3"
    assert refused.status == "malformed" and "must be an integer, got null" in refused.text


def test_what_a_function_raises_arrives() -> None:
    @function_tool
    def fail() -> str:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        call(fail)
