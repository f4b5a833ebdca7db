"""Runs the calls that a model asks for; errors become tool responses, too."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

from caldera.errors import ConfigError
from caldera.http_client import Retries
from caldera.threads import is_cancelled
from caldera.tools.base import BaseTool, ToolResponse, encodable
from caldera.tools.formats import FunctionCall
from caldera.tools.schemas import fit_arguments

logger = logging.getLogger(__name__)


ToolStatus = Literal["ok", "error", "timeout", "malformed", "unknown"]
Side = Literal["left", "middle", "right"]
FIRST_PAUSE_SECONDS = 0.5
RETRIED = (ConnectionError, TimeoutError)


@dataclass
class ToolState:
    """The state that tools share with the trajectory that calls them."""

    request_id: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The row's: by tool, `create_kwargs`, `execute_kwargs` and `release_kwargs`."""
    tool_names: Sequence[str] | None = None
    """The tools that this trajectory may call; None: all."""
    memory: dict[str, Any] = field(default_factory=dict)
    """The state of a tool from one call to the next, by its name."""


@dataclass(frozen=True)
class ToolOutcome:
    """The outcome of a call."""

    name: str
    text: str
    """For the model to read."""
    status: ToolStatus = "ok"
    reward: float | None = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class ToolRunner:
    """Runs the calls of all trajectories of a process. All of them share each tool's limits."""

    def __init__(
        self,
        tools: Sequence[BaseTool],
        max_parallel_calls: int = 1,
        max_response_length: int = 256,
        truncate_side: Side = "middle",
    ) -> None:
        """`max_parallel_calls` of one response run, at the same time; `max_response_length` is in
        characters."""
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) < len(tools):
            names = [tool.name for tool in tools]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConfigError(f"tools have different names: {', '.join(twice)} is there twice")
        self._max_parallel_calls = max_parallel_calls
        self._max_response_length = max_response_length
        self._truncate_side: Side = truncate_side
        self._gates = {name: _Gate(tool) for name, tool in self.tools.items()}
        self._reported: set[tuple[str, type[BaseException]]] = set()

    def schemas(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The schemas of the tools for the model, or of those of these names."""
        for name in () if names is None else names:
            if name not in self.tools:
                known = ", ".join(self.tools) or "none"
                raise ConfigError(f"extra_info.tool_selection names {name!r}; there are {known}")
        chosen = self.tools if names is None else names
        return [self.tools[name].schema.model_dump() for name in chosen]

    async def run(self, calls: Sequence[FunctionCall], state: ToolState) -> list[ToolOutcome]:
        """The outcomes, in the order of the calls. Calls beyond `max_parallel_calls` are not run;
        the model gets that as the response."""
        taken = calls[: self._max_parallel_calls]
        outcomes = await asyncio.gather(*(self._run_one(call, state) for call in taken))
        return [*outcomes, *(self._not_run(call) for call in calls[len(taken) :])]

    def malformed(self, problem: str, name: str = "") -> ToolOutcome:
        """The outcome of a call that could not be read."""
        return self._refusal(name, "malformed", problem)

    async def close(self) -> None:
        """Let go of what the tools hold."""
        for tool in self.tools.values():
            await tool.close()

    # ------------------------------------------------------------------ one call

    async def _run_one(self, call: FunctionCall, state: ToolState) -> ToolOutcome:
        start = time.perf_counter()
        shown = self.tools if state.tool_names is None else state.tool_names
        if call.name not in self.tools or call.name not in shown:
            known = ", ".join(shown) or "none"
            told = f"there is no tool {call.name!r}; there are {known}"
            return self._refusal(call.name, "unknown", told)
        tool = self.tools[call.name]
        try:
            arguments = fit_arguments(_object(call.arguments), tool.schema.function, call.texts)
        except (ValueError, RecursionError) as error:
            return self.malformed(str(error), call.name)
        try:
            response, reward, metrics = await self._attempts(tool, arguments, state)
        except _TimeUp:
            seconds = time.perf_counter() - start
            told = f"{tool.name} did not answer within {tool.limits.timeout:g} s"
            return self._refusal(tool.name, "timeout", told, seconds)
        except asyncio.CancelledError:
            if is_cancelled():  # and not just something that the tool itself waited for
                raise
            seconds = time.perf_counter() - start
            return self._refusal(tool.name, "error", "the call was given up", seconds)
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- of the tool's own code
            self._report(tool.name, error)
            told = str(error) or type(error).__name__
            return self._refusal(tool.name, "error", told, time.perf_counter() - start)
        return ToolOutcome(
            tool.name,
            self._shown(response.text or ""),
            "ok",
            reward,
            metrics,
            time.perf_counter() - start,
        )

    async def _attempts(
        self, tool: BaseTool, arguments: dict[str, Any], state: ToolState
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        async def attempt() -> tuple[ToolResponse, float | None, dict[str, Any]]:
            async with AsyncExitStack() as stack:
                await self._gates[tool.name].enter(stack)
                return await _within(tool, arguments, state)

        retries = Retries(tool.limits.attempts, FIRST_PAUSE_SECONDS)
        return await retries.run_async(attempt, RETRIED)

    # ------------------------------------------------------------------ the texts for the model

    def _not_run(self, call: FunctionCall) -> ToolOutcome:
        most = self._max_parallel_calls
        return self._refusal(
            call.name, "error", f"not run, since an answer may hold {most} call{'s'[: most > 1]}"
        )

    def _refusal(
        self, name: str, status: ToolStatus, told: str, seconds: float = 0.0
    ) -> ToolOutcome:
        text = self._shown(f"Error when executing tool: {told}")
        return ToolOutcome(name, text, status, seconds=seconds)

    def _shown(self, text: str) -> str:
        return encodable(truncate(text, self._max_response_length, self._truncate_side))

    def _report(self, name: str, error: BaseException) -> None:
        """Tell the user the first time, who can mend a tool; models make it fail by the hundred."""
        if (name, type(error)) not in self._reported:
            self._reported.add((name, type(error)))
            logger.warning(
                "The tool %s failed, which the model got back; more of this kind are not logged",
                name,
                exc_info=error,
            )


class _TimeUp(Exception):
    """A call took longer than its tool's timeout."""


async def _within(
    tool: BaseTool, arguments: dict[str, Any], state: ToolState
) -> tuple[ToolResponse, float | None, dict[str, Any]]:
    """One attempt within the tool's timeout."""
    limit = asyncio.timeout(tool.limits.timeout)
    try:
        async with limit:
            return await _instance(tool, arguments, state)
    except TimeoutError as error:
        if limit.expired():
            raise _TimeUp from error
        raise


async def _instance(
    tool: BaseTool, arguments: dict[str, Any], state: ToolState
) -> tuple[ToolResponse, float | None, dict[str, Any]]:
    # A parquet file gives each row the keys of all rows: what is not a row's own is None.
    row = (state.tools_kwargs or {}).get(tool.name) or {}
    instance, _ = await tool.create(create_kwargs=row.get("create_kwargs") or {})
    try:
        answer = await tool.execute(
            instance, arguments, agent_data=state, **row.get("execute_kwargs") or {}
        )
    finally:
        await tool.release(instance, **row.get("release_kwargs") or {})
    return _checked(answer, tool)


def _checked(answer: Any, tool: BaseTool) -> tuple[ToolResponse, float | None, dict[str, Any]]:
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise TypeError(
            f"{type(tool).__name__}.execute must return (ToolResponse, reward, metrics), "
            f"got {answer!r:.200}"
        )
    response, reward, metrics = answer
    if not isinstance(response, ToolResponse):
        raise TypeError(f"{type(tool).__name__} answered a {type(response).__name__}")
    if response.image or response.video:
        raise TypeError(f"{tool.name} answered with images or videos; models read text alone here")
    if not isinstance(response.text, str | None):
        raise TypeError(f"{tool.name} answered a text that is a {type(response.text).__name__}")
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"{tool.name} gave the reward {reward}, which is not finite")
    return response, None if reward is None else float(reward), _plain(metrics or {})


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics as they can be written to a dump."""
    read: dict[str, Any] = json.loads(json.dumps(_named(dict(metrics)), default=_plain_value))
    return read


def _plain_value(value: Any) -> Any:
    return _named(value.tolist()) if hasattr(value, "tolist") else str(value)


def _named(value: Any) -> Any:
    """The value with texts as the keys of its mappings, as JSON has them."""
    if isinstance(value, Mapping):
        return {str(key): _named(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    return value


def _object(arguments: str) -> dict[str, Any]:
    read = json.loads(arguments or "{}")
    if not isinstance(read, dict):
        raise ValueError(f"the arguments must be a JSON object, got {arguments:.200}")
    return read


def truncate(text: str, length: int, side: Side) -> str:
    """At most `length` characters of a text: its head (left), its tail (right), or half of each."""
    if len(text) <= length:
        return text
    if side == "left":
        return f"{text[:length]}...(truncated)"
    if side == "right":
        return f"(truncated)...{text[len(text) - length :]}"
    half = length // 2
    return f"{text[:half]}...(truncated)...{text[len(text) - half :]}"


class _Gate:
    """Lets in as many calls of a tool as its limits allow."""

    def __init__(self, tool: BaseTool) -> None:
        self._limits = tool.limits
        # A process may run one event loop after the other; places belong to one.
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )
        rate = tool.limits.rate_limit or 1.0
        self._window = max(1, int(rate)) / rate  # seconds in which that many calls may begin
        self._starts: deque[float] = deque(maxlen=max(1, int(rate)))

    async def enter(self, stack: AsyncExitStack) -> None:
        """Wait for a place, which is held until the stack is left, and for the rate."""
        if self._limits.num_workers is not None:
            loop = asyncio.get_running_loop()
            if loop not in self._places:
                self._places[loop] = asyncio.Semaphore(self._limits.num_workers)
            await stack.enter_async_context(self._places[loop])
        if self._limits.rate_limit is not None:
            await asyncio.sleep(self._reserve() - time.monotonic())

    def _reserve(self) -> float:
        """When the next call may begin."""
        start = time.monotonic()
        if len(self._starts) == self._starts.maxlen:
            start = max(start, self._starts[0] + self._window)
        self._starts.append(start)
        return start
