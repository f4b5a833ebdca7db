from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from types import ModuleType
from typing import Any

import numpy
import pytest

from caldera.errors import ConfigError
from caldera.tools import function_tool, running
from caldera.tools.base import BaseTool, ToolResponse
from caldera.tools.formats import FunctionCall
from caldera.tools.function_tool import tools_of
from caldera.tools.running import ToolRunner, ToolState, truncate
from caldera.tools.schemas import OpenAIFunctionToolSchema


def schema(name: Any, **properties: Any) -> Any:
    parameters = {"type": "object", "properties": properties}
    return OpenAIFunctionToolSchema.model_validate(
        {"type": "function", "function": {"name": name, "parameters": parameters}}
    )


class Recording(BaseTool):
    """Does what its `act` does, and notes what is asked of it."""

    def __init__(self, act: Any = None, name: str = "note", **config: Any) -> None:
        super().__init__({"type": "native", **config}, schema(name, x={"type": "integer"}))
        self.act = act
        self.seen: list[Any] = []

    async def create(self, instance_id: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        self.seen.append(("create", kwargs))
        return "i1", ToolResponse()

    async def execute(self, instance_id: Any, parameters: Any, **kwargs: Any) -> Any:
        self.seen.append(("execute", instance_id, parameters, kwargs))
        result = await self.act(parameters) if self.act else "done"
        return (ToolResponse(result), 0.5, {"m": 1}) if isinstance(result, str) else result

    async def release(self, instance_id: Any, **kwargs: Any) -> None:
        self.seen.append(("release", instance_id, kwargs))


def run(tool: Any, *calls: Any, state: Any = None, **options: Any) -> Any:
    runner = ToolRunner(tool if isinstance(tool, list) else [tool], **options)
    given = [FunctionCall(name, json.dumps(arguments)) for name, arguments in calls]
    return asyncio.run(runner.run(given, state or ToolState()))


def test_a_call_is_created_executed_and_released() -> None:
    tool = Recording()
    row = {"note": {"create_kwargs": {"a": 1}, "execute_kwargs": {"b": 2}, "release_kwargs": None}}
    state = ToolState(tools_kwargs=row)
    (outcome,) = run(tool, ("note", {"x": 3}), state=state)
    assert tool.seen == [
        ("create", {"create_kwargs": {"a": 1}}),
        ("execute", "i1", {"x": 3}, {"agent_data": state, "b": 2}),
        ("release", "i1", {}),
    ]
    assert (outcome.name, outcome.text, outcome.status) == ("note", "done", "ok")
    assert (outcome.reward, outcome.metrics) == (0.5, {"m": 1})
    assert outcome.seconds > 0


async def fail(parameters: Any) -> None:
    raise LookupError("nothing there")


async def hang(parameters: Any) -> None:
    await asyncio.Event().wait()


async def give_nothing(parameters: Any) -> None:
    return None


async def give_an_image(parameters: Any) -> tuple[Any, ...]:
    return ToolResponse(image=["pixels"]), 0.0, {}


async def leave(parameters: Any) -> None:
    sys.exit(3)


async def be_cancelled(parameters: Any) -> None:
    raise asyncio.CancelledError


async def give_a_number(parameters: Any) -> tuple[Any, ...]:
    return ToolResponse(7), 0.0, {}  # type: ignore[arg-type]


async def give_no_number(parameters: Any) -> tuple[Any, ...]:
    return ToolResponse("a"), float("nan"), {}


@pytest.mark.parametrize(
    ("tool", "call", "status", "told"),
    [
        (Recording(leave), ("note", {}), "error", "3"),
        (Recording(be_cancelled), ("note", {}), "error", "given up"),
        (Recording(give_a_number), ("note", {}), "error", "a text that is a int"),
        (Recording(give_no_number), ("note", {}), "error", "which is not finite"),
        (Recording(fail), ("note", {}), "error", "nothing there"),
        (Recording(hang, timeout=0.01), ("note", {}), "timeout", "note did not answer within 0.01"),
        (Recording(give_nothing), ("note", {}), "error", "must return (ToolResponse, reward"),
        (Recording(give_an_image), ("note", {}), "error", "models read text alone"),
        (Recording(), ("node", {}), "unknown", "no tool 'node'; there are note"),
        (Recording(), ("note", {"y": 1}), "malformed", "no parameter 'y'"),
        (Recording(), ("note", [1]), "malformed", "must be a JSON object"),
    ],
)
def test_whatever_goes_wrong_is_told(
    tool: Any, call: tuple[Any, ...], status: str, told: str
) -> None:
    (outcome,) = run(tool, call)
    assert outcome.status == status
    assert outcome.text.startswith("Error when executing tool: ") and told in outcome.text
    assert outcome.reward == 0.0
    assert [event[0] for event in tool.seen] in ([], ["create", "execute", "release"])


def test_arguments_that_are_no_json_are_malformed() -> None:
    runner = ToolRunner([Recording()])
    (outcome,) = asyncio.run(runner.run([FunctionCall("note", "{x")], ToolState()))
    assert outcome.status == "malformed"
    assert runner.malformed("it is not closed").text == (
        "Error when executing tool: it is not closed"
    )


def test_arguments_that_are_nested_too_deeply_are_malformed() -> None:
    calls = [FunctionCall("note", '{"x": ' + "[" * 100_000)]
    (outcome,) = asyncio.run(ToolRunner([Recording()]).run(calls, ToolState()))
    assert outcome.status == "malformed"


@pytest.mark.parametrize("raises", [True, False])
def test_ten_megabytes_are_cut(raises: bool) -> None:
    async def flood(parameters: Any) -> str:
        if raises:
            raise ValueError("y" * 10_000_000)
        return "y" * 10_000_000

    (outcome,) = run(Recording(flood), ("note", {}))
    assert len(outcome.text) < 300 and "...(truncated)..." in outcome.text


def test_what_no_tokenizer_takes_is_replaced() -> None:
    async def speak(parameters: Any) -> str:
        return "half \ud83d of a pair"

    assert run(Recording(speak), ("note", {}))[0].text == "half ? of a pair"


def test_metrics_can_be_written_to_a_dump() -> None:
    async def measure(parameters: Any) -> tuple[Any, ...]:
        return ToolResponse(""), None, {"a": {1}, "b": numpy.float32(0.5), "c": (1, 2)}

    (outcome,) = run(Recording(measure), ("note", {}))
    assert outcome.metrics == {"a": "{1}", "b": 0.5, "c": [1, 2]}


def test_metrics_may_have_any_keys() -> None:
    async def measure(parameters: Any) -> tuple[Any, ...]:
        return ToolResponse(""), None, {(1, 2): {None: 3}, 4: [{("a",): 5}], "b": ({6: 7},)}

    (outcome,) = run(Recording(measure), ("note", {}))
    assert outcome.status == "ok"
    assert outcome.metrics == {
        "(1, 2)": {"None": 3}, "4": [{"('a',)": 5}], "b": [{"6": 7}],
    }  # fmt: skip


def test_a_function_that_exits_is_told() -> None:
    @function_tool
    def leave_at_once() -> str:
        """Leaves."""
        sys.exit(3)

    module = ModuleType("tools")
    vars(module)["leave_at_once"] = leave_at_once
    (tool,) = tools_of(module)
    (outcome,) = run(tool, ("leave_at_once", {}))
    assert outcome.status == "error" and "SystemExit: 3" in outcome.text


def test_a_failing_tool_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run(Recording(fail), *[("note", {})] * 3, max_parallel_calls=3)
    assert len(caplog.records) == 1 and "LookupError" in caplog.text


def test_a_row_may_call_the_tools_that_it_selects() -> None:
    tools = [Recording(), Recording(name="other")]
    outcomes = run(
        tools, ("note", {}), ("other", {}), max_parallel_calls=2,
        state=ToolState(tool_names=["other"]),
    )  # fmt: skip
    assert [outcome.status for outcome in outcomes] == ["unknown", "ok"]
    runner = ToolRunner(tools)
    assert [s["function"]["name"] for s in runner.schemas()] == ["note", "other"]
    assert [s["function"]["name"] for s in runner.schemas(["other"])] == ["other"]
    with pytest.raises(ConfigError, match=r"extra_info\.tool_selection names 'another'"):
        runner.schemas(["another"])


def test_calls_of_one_answer_run_together_and_those_beyond_the_limit_do_not() -> None:
    both = asyncio.Barrier(2)

    async def meet(parameters: Any) -> str:
        await asyncio.wait_for(both.wait(), 30)  # only passes if two are here at the same time
        return f"{parameters['x']}"

    tool = Recording(meet)
    calls = [("note", {"x": x}) for x in (1, 2, 3)]
    outcomes = run(tool, *calls, max_parallel_calls=2)
    assert [outcome.text for outcome in outcomes[:2]] == ["1", "2"]
    assert outcomes[2].status == "error" and "2 calls" in outcomes[2].text
    assert len(tool.seen) == 6


def test_no_more_calls_run_at_the_same_time_than_workers_are_allowed() -> None:
    now = most = 0

    async def count(parameters: Any) -> str:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return ""

    runner = ToolRunner([Recording(count, num_workers=3)], max_parallel_calls=20)
    calls = [FunctionCall("note", "{}")] * 20
    for _ in range(2):  # one event loop after the other
        outcomes = asyncio.run(runner.run(calls, ToolState()))
        assert {outcome.status for outcome in outcomes} == {"ok"}
    assert most == 3


@pytest.mark.parametrize(("rate", "starts"), [(2, [0, 0, 1, 1, 2]), (0.5, [0, 2, 4, 6, 8])])
def test_no_more_calls_begin_in_a_second_than_the_rate_allows(
    monkeypatch: pytest.MonkeyPatch, rate: float, starts: list[int]
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    gate = running._Gate(Recording(rate_limit=rate))
    assert [gate._reserve() - 100.0 for _ in starts] == starts


def test_calls_are_tried_again_when_the_service_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "FIRST_PAUSE_SECONDS", 0.001)
    failures = [ConnectionError("down"), TimeoutError("slow")]

    async def recover(parameters: Any) -> str:
        if failures:
            raise failures.pop()
        return "up"

    tool = Recording(recover, attempts=3)
    assert run(tool, ("note", {}))[0].text == "up"
    failures += [ConnectionError("down")] * 3
    assert run(tool, ("note", {}))[0].text == "Error when executing tool: down"
    assert not failures
    other = Recording(fail, attempts=3)  # a mistake is not tried again
    assert run(other, ("note", {}))[0].status == "error"
    assert len(other.seen) == 3


def test_cancelling_a_trajectory_releases_its_instance() -> None:
    tool = Recording(hang)

    async def give_up() -> None:
        running_call = asyncio.create_task(
            ToolRunner([tool]).run([FunctionCall("note", "{}")], ToolState())
        )
        while len(tool.seen) < 2:
            await asyncio.sleep(0)
        running_call.cancel()
        await asyncio.wait([running_call])
        assert running_call.cancelled()

    asyncio.run(give_up())
    assert tool.seen[-1] == ("release", "i1", {})


@pytest.mark.parametrize(
    ("side", "shown"),
    [
        ("left", "abcd...(truncated)"),
        ("right", "(truncated)...ghij"),
        ("middle", "ab...(truncated)...ij"),
    ],
)
def test_long_answers_are_truncated(side: Any, shown: str) -> None:
    assert truncate("abcdefghij", 4, side) == shown
    assert truncate("abcd", 4, side) == "abcd"

    async def speak(parameters: Any) -> str:
        return "abcdefghij"

    options = {"max_response_length": 4, "truncate_side": side}
    assert run(Recording(speak), ("note", {}), **options)[0].text == shown


def test_tools_have_different_names() -> None:
    with pytest.raises(ConfigError, match="note is there twice"):
        ToolRunner([Recording(), Recording()])


@pytest.mark.parametrize(
    "config", [{"timeout": 0}, {"num_workers": 1.5}, {"rate_limit": "x"}, {"attempts": None}]
)
def test_limits_that_make_no_sense(config: dict[str, Any]) -> None:
    (key,) = config
    with pytest.raises(ConfigError, match=f"config.{key}="):
        Recording(**config)
