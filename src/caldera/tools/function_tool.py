"""Functions as tools: the schema comes from their type hints and their docstring."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from caldera.errors import ConfigError
from caldera.threads import in_thread
from caldera.tools.base import BaseTool, ToolLimits, ToolResponse
from caldera.tools.schemas import OpenAIFunctionSchema, OpenAIFunctionToolSchema

Function = TypeVar("Function", bound=Callable[..., Any])
MARK = "__caldera_tool__"
AGENT_DATA = "agent_data"
"""A parameter of this name gets the trajectory's `ToolState`; the model does not see it."""


@overload
def function_tool(name: Function) -> Function: ...


@overload
def function_tool(
    name: str | None = None, *, schema: Mapping[str, Any] | None = None, **limits: Any
) -> Callable[[Function], Function]: ...


def function_tool(name: Any = None, *, schema: Any = None, **limits: Any) -> Any:
    """Decorate a function to make it a tool, under its own name or another.

    `schema` replaces the one that type hints and docstring give; `limits` are those of
    `ToolLimits`. The function stays what it was.
    """
    if callable(name):
        return function_tool()(name)

    def mark(function: Function) -> Function:
        setattr(function, MARK, FunctionTool(function, name, schema, limits))
        return function

    return mark


def is_marked(function: object) -> bool:
    """Whether a function is decorated."""
    return hasattr(function, MARK)


def tools_of(module: ModuleType) -> list[BaseTool]:
    """The tools that a module holds."""
    held = [getattr(value, MARK, value) for value in vars(module).values()]
    return list(dict.fromkeys(tool for tool in held if isinstance(tool, BaseTool)))


class FunctionTool(BaseTool):
    """A function that a model can call. One that is not `async` runs in a thread."""

    default_limits = ToolLimits(num_workers=64)

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        schema: Mapping[str, Any] | OpenAIFunctionToolSchema | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        known = set(vars(ToolLimits()))
        for key in limits or {}:
            if key not in known:
                raise ConfigError(f"@function_tool has no option {key!r}; it has {sorted(known)}")
        self._function = function
        given = schema_of(function, name) if schema is None else _given_schema(schema, name)
        super().__init__({"type": "native", **(limits or {})}, given)
        self._takes_agent_data = AGENT_DATA in inspect.signature(function).parameters

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        if self._takes_agent_data:
            parameters = {**parameters, AGENT_DATA: kwargs.get(AGENT_DATA)}
        if inspect.iscoroutinefunction(self._function):
            result = await self._function(**parameters)
        else:
            result = await in_thread(self._function, **parameters)
        return _answer(result)


def _given_schema(
    schema: Mapping[str, Any] | OpenAIFunctionToolSchema, name: str | None
) -> OpenAIFunctionToolSchema:
    given = OpenAIFunctionToolSchema.model_validate(schema)
    if name is not None and given.function.name != name:
        raise ConfigError(f"@function_tool is named {name!r}, its schema {given.function.name!r}")
    return given


def _answer(result: Any) -> tuple[ToolResponse, float | None, dict[str, Any]]:
    """A response, or (response[, reward[, metrics]])."""
    given = list(result) if isinstance(result, tuple) and 1 <= len(result) <= 3 else [result]
    result, reward, metrics = given + [None, {}][len(given) - 1 :]
    if isinstance(result, ToolResponse):
        return result, reward, metrics
    if isinstance(result, dict):
        return ToolResponse(json.dumps(result, ensure_ascii=False)), reward, metrics
    return ToolResponse(str(result)), reward, metrics


# ---------------------------------------------------------------------- schemas

SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def schema_of(function: Callable[..., Any], name: str | None = None) -> OpenAIFunctionToolSchema:
    """The schema of a function."""
    what = f"the tool {getattr(function, '__qualname__', function)}"
    hints = get_type_hints(function)
    description, told = _docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == AGENT_DATA:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"{what}: {parameter} cannot be called by name; models name each parameter"
            )
        if parameter.name not in hints:
            raise ConfigError(f"{what}: {parameter.name} needs a type hint")
        schema = _type_schema(hints[parameter.name], f"{what}: {parameter.name}")
        if parameter.name in told:
            schema["description"] = told[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        properties[parameter.name] = schema
    for other in told:
        if other not in properties:
            raise ConfigError(f"{what}: its docstring speaks of {other!r}, which is no parameter")
    parameters = {"type": "object", "properties": properties, "required": required}
    called = name or str(getattr(function, "__name__", ""))
    if not called:
        raise ConfigError(f"{what} has no name of its own: @function_tool('name') gives it one")
    return OpenAIFunctionToolSchema(OpenAIFunctionSchema(called, description, parameters))


def _type_schema(hint: Any, what: str) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in SCALARS:
        return {"type": SCALARS[hint]}
    if origin in (Union, types.UnionType):
        choices = [_type_schema(one, what) for one in inner if one is not type(None)]
        schema = choices[0] if len(choices) == 1 else {"anyOf": choices}
        return schema | ({"nullable": True} if type(None) in inner else {})
    if origin is Literal:
        kinds = {SCALARS.get(type(value)) for value in inner}
        return ({"type": kinds.pop()} if len(kinds) == 1 else {}) | {"enum": list(inner)}
    if hint is list or origin is list:
        return {"type": "array"} | ({"items": _type_schema(inner[0], what)} if inner else {})
    if hint is dict or origin is dict:
        return {"type": "object"}
    raise ConfigError(
        f"{what} is a {hint}, which a model cannot write; take str, int, float, bool, Literal, "
        "list, dict, Any, or several of them by |"
    )


SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
ENTRY = re.compile(r"^\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """(what comes before the sections, the descriptions under `Args:`), of Google's style."""
    description: list[str] = []
    told: dict[str, str] = {}
    section, last, indent = "", "", 0
    for line in text.splitlines():
        if match := SECTION.match(line):
            section = match[1]
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            depth = len(line) - len(line.lstrip())
            entry = ENTRY.match(line)
            if entry and (not told or depth <= indent):
                last, indent = entry[1], depth
                told[last] = entry[2]
            elif line.strip() and last:
                told[last] = f"{told[last]} {line.strip()}".strip()
    return "\n".join(description).strip(), told
