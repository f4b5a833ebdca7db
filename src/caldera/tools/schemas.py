"""The name and parameters of a tool, for the model and for the check of its calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from caldera.errors import ConfigError

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "required": []}


@dataclass(frozen=True)
class OpenAIFunctionSchema:
    """A function: its name, what it does, and the JSON schema of its parameters."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class OpenAIFunctionToolSchema:
    """A tool in the form of OpenAI's interface."""

    function: OpenAIFunctionSchema
    type: str = "function"

    @classmethod
    def model_validate(cls, given: Any, where: str = "tool_schema") -> OpenAIFunctionToolSchema:
        """The schema that plain data describe; `where` is what a mistake in them is called."""
        if isinstance(given, cls):
            return given
        function = _known(given, where, ("type", "function")).get("function")
        if given.get("type", "function") != "function":
            raise ConfigError(f"{where}.type={given['type']!r} must be 'function'")
        inside = f"{where}.function"
        function = _known(function, inside, ("name", "description", "parameters", "strict"))
        for key in ("name", "description"):
            if not isinstance(function.get(key, ""), str):
                raise ConfigError(f"{inside}.{key}={function[key]!r} must be text")
        if not function.get("name"):
            raise ConfigError(f"{inside}.name is missing: models call a tool by it")
        return cls(
            OpenAIFunctionSchema(
                function["name"],
                function.get("description", ""),
                _parameters(function.get("parameters") or NO_PARAMETERS, f"{inside}.parameters"),
                bool(function.get("strict", False)),
            )
        )

    @classmethod
    def of_text(cls, name: str, description: str, parameter: str, told: str) -> Self:
        """The schema of a tool with one parameter, a text."""
        properties = {parameter: {"type": "string", "description": told}}
        parameters = {"type": "object", "properties": properties, "required": [parameter]}
        return cls(OpenAIFunctionSchema(name, description, parameters))

    def model_dump(self, **_options: Any) -> dict[str, Any]:
        """The schema as chat templates take it. Options of pydantic's method of this name, with
        which extension code calls it, change nothing: what is not set is left out anyway."""
        function = {
            "name": self.function.name,
            "description": self.function.description,
            "parameters": _plain(self.function.parameters),
        }
        if self.function.strict:
            function["strict"] = True
        return {"type": self.type, "function": function}


def _known(given: Any, where: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}={given!r} must be a mapping with the keys {', '.join(keys)}")
    for key in given:
        if key not in keys:
            raise ConfigError(f"{where}.{key} is unknown; there are {', '.join(keys)}")
    return given


def _parameters(given: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or given.get("type", "object") != "object":
        raise ConfigError(f"{where}={given!r} must be a JSON schema whose type is 'object'")
    properties = given.get("properties") or {}
    if not isinstance(properties, Mapping):
        raise ConfigError(f"{where}.properties={properties!r} must be a mapping")
    for name, schema in properties.items():
        if not isinstance(schema, Mapping):
            raise ConfigError(f"{where}.properties.{name}={schema!r} must be a JSON schema")
        choices = schema.get("enum")
        if choices is not None and not isinstance(choices, list):
            raise ConfigError(f"{where}.properties.{name}.enum={choices!r} must be a list")
    required = given.get("required") or []
    if not isinstance(required, list):
        raise ConfigError(f"{where}.required={required!r} must be a list of names")
    for name in map(str, required):
        if name not in properties:
            raise ConfigError(f"{where}.required names {name!r}, which is none of its properties")
    return {**given, "type": "object", "properties": properties, "required": list(required)}


def _plain(value: Any) -> Any:
    """Without nulls, with which some write that a key is not set."""
    if isinstance(value, Mapping):
        return {key: _plain(inside) for key, inside in value.items() if inside is not None}
    return [_plain(inside) for inside in value] if isinstance(value, list) else value


# ---------------------------------------------------------------------- arguments


def fit_arguments(
    arguments: Mapping[str, Any],
    schema: OpenAIFunctionSchema,
    texts: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The arguments of a call, in the types of the schema. ValueError if they do not fit: its
    text is for the model. `texts` are arguments as they were written, for those that are text."""
    properties: Mapping[str, Any] = schema.parameters.get("properties") or {}
    missing = [name for name in schema.parameters.get("required") or [] if name not in arguments]
    if missing:
        raise ValueError(f"{schema.name} also needs {', '.join(missing)}")
    if not schema.parameters.get("additionalProperties"):
        for name in arguments:
            if name not in properties:
                known = ", ".join(properties) or "none"
                raise ValueError(f"{schema.name} has no parameter {name!r}; it has {known}")
    fitting: dict[str, Any] = {}
    for name, value in arguments.items():
        wanted = properties.get(name) or {}
        said = texts[name] if texts and name in texts and wanted.get("type") == "string" else value
        fitting[name] = _fit(said, wanted, f"{schema.name}'s {name}")
    return fitting


def _fit(value: Any, schema: Mapping[str, Any], what: str) -> Any:
    """The value, or the same in the type that is asked for. Schemas that are not a single type
    (`anyOf`, `$ref`) are left to the tool."""
    wanted = schema.get("type")
    if value is None and schema.get("nullable") is True:
        return None
    if isinstance(wanted, str):
        value = _in_type(value, wanted, what)
        if wanted == "array" and isinstance(schema.get("items"), Mapping):
            value = [_fit(item, schema["items"], f"an item of {what}") for item in value]
    choices = schema.get("enum")
    if choices and value not in choices:
        raise ValueError(f"{what} must be one of {json.dumps(list(choices))}, got {_shown(value)}")
    return value


TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def _in_type(value: Any, wanted: str, what: str) -> Any:
    if wanted not in TYPES:
        return value
    if isinstance(value, TYPES[wanted]) and (wanted == "boolean" or not isinstance(value, bool)):
        return value
    # Models often write 72 for "72" and the other way around: what is meant is plain.
    if wanted == "string" and isinstance(value, int | float):
        return json.dumps(value)
    if wanted == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and wanted in ("integer", "number", "boolean", "array", "object"):
        try:
            read = json.loads(value)
        except ValueError:
            read = None
        if isinstance(read, TYPES[wanted]) and isinstance(read, bool) == (wanted == "boolean"):
            return read
    article = "an" if wanted[0] in "aio" else "a"
    raise ValueError(f"{what} must be {article} {wanted}, got {_shown(value)}")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:100]}..."
