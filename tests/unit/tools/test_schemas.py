from __future__ import annotations

from typing import Any

import pytest

from caldera.errors import ConfigError
from caldera.tools.schemas import OpenAIFunctionToolSchema, fit_arguments

GIVEN = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "what": {"type": "string", "description": "the thing", "enum": None},
                "most": {"type": "integer"},
                "share": {"type": "number"},
                "deep": {"type": "boolean"},
                "places": {"type": "array", "items": {"type": "string"}},
                "order": {"type": "string", "enum": ["up", "down"]},
                "free": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            },
            "required": ["what"],
        },
        "strict": False,
    },
}


def look() -> Any:
    return OpenAIFunctionToolSchema.model_validate(GIVEN)


def test_the_model_is_shown_what_is_set() -> None:
    shown = look().model_dump(exclude_unset=True)
    assert shown["function"]["parameters"]["properties"]["what"] == {
        "type": "string",
        "description": "the thing",
    }
    assert "strict" not in shown["function"]
    assert OpenAIFunctionToolSchema.model_validate(shown).model_dump() == shown


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"name": ""}, "function.name"),
        ({"name": 3}, "function.name=3"),
        ({"parametres": {}}, "function.parametres"),
        ({"parameters": {"type": "array"}}, "function.parameters"),
        ({"parameters": {"properties": {"a": "string"}}}, "properties.a"),
        ({"parameters": {"properties": {}, "required": ["a"]}}, "'a'"),
        ({"parameters": {"properties": {"a": {}}, "required": "a"}}, "required='a'"),
        ({"parameters": {"properties": {"a": {}}, "required": [["a"]]}}, "required names"),
        ({"parameters": {"properties": {"a": {"enum": "ab"}}}}, "properties.a.enum='ab'"),
    ],
)
def test_a_mistake_is_named(change: dict[str, Any], named: str) -> None:
    given = {"type": "function", "function": {"name": "look", "description": ""} | change}
    with pytest.raises(ConfigError) as error:
        OpenAIFunctionToolSchema.model_validate(given, "tools[0].tool_schema")
    assert "tools[0].tool_schema" in str(error.value) and named in str(error.value)


def test_arguments_are_taken_as_they_are_meant() -> None:
    arguments = {
        "what": 72, "most": "3", "share": 2, "deep": "true", "places": '["a"]', "order": "up",
        "free": [1],
    }  # fmt: skip
    assert fit_arguments(arguments, look().function) == {
        "what": "72", "most": 3, "share": 2, "deep": True, "places": ["a"], "order": "up",
        "free": [1],
    }  # fmt: skip
    assert fit_arguments({"what": "x", "most": 2.0}, look().function)["most"] == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "look also needs what"),
        ({"what": "x", "where": "y"}, "no parameter 'where'"),
        ({"what": ["x"]}, "look's what must be a string"),
        ({"what": "x", "most": 2.5}, "must be an integer, got 2.5"),
        ({"what": "x", "most": True}, "must be an integer, got true"),
        ({"what": "x", "share": "much"}, "must be a number"),
        ({"what": "x", "deep": 1}, "must be a boolean"),
        ({"what": "x", "places": [["y"]]}, "an item of look's places must be a string"),
        ({"what": "x", "order": "side"}, 'one of ["up", "down"]'),
    ],
)
def test_arguments_that_do_not_fit_are_explained(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as error:
        fit_arguments(arguments, look().function)
    assert told in str(error.value)


def test_texts_are_what_was_written() -> None:
    texts = {"what": '{"a": [1,2]}', "most": "3"}
    arguments = {"what": {"a": [1, 2]}, "most": 3}
    assert fit_arguments(arguments, look().function, texts) == {"what": texts["what"], "most": 3}
