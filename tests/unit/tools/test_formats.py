from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caldera.tools import formats  # noqa: F401 -- registers them
from caldera.tools.formats import TOOL_PARSERS, FunctionCall


def parse(name: str, text: str) -> Any:
    return TOOL_PARSERS[name](tokenizer=None).parse_text(text)


def calls(found: Any) -> list[Any]:
    return [(call.name, json.loads(call.arguments)) for call in found.calls]


def test_hermes_finds_all_calls_and_the_text_around_them() -> None:
    text = (
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    )
    found = parse("hermes", text)
    assert calls(found) == [("add", {"a": 1, "b": "é"}), ("now", {})]
    assert found.content == "Let me see."
    assert not found.problems


@pytest.mark.parametrize(
    ("inside", "told"),
    [
        ('{"name": "add", "arguments": {"a": 1}', "not valid JSON"),
        ('{"arguments": {"a": 1}}', "needs a 'name'"),
        ('["add", 1]', "needs a 'name'"),
        ('{"name": "add", "arguments": [1]}', "must be an object"),
        ('{"name": "add", "arguments": "{a"}', "not valid JSON"),
    ],
)
def test_a_malformed_call_is_told_and_others_are_kept(inside: str, told: str) -> None:
    text = f'<tool_call>{inside}</tool_call><tool_call>{{"name": "b"}}</tool_call>'
    found = parse("hermes", text)
    assert calls(found) == [("b", {})]
    assert len(found.problems) == 1 and told in found.problems[0]


def test_a_call_that_is_cut_off_is_told() -> None:
    found = parse("hermes", 'a<tool_call>{"name": "add", "arg')
    assert found.content == "a" and not found.calls and len(found.problems) == 1


def test_arguments_may_be_json_text() -> None:
    assert calls(
        parse("hermes", '<tool_call>{"name":"a","arguments":"{\\"x\\":1}"}</tool_call>')
    ) == [("a", {"x": 1})]


@pytest.mark.parametrize(
    "text",
    [
        '{"tool_calls": [{"function": {"name": "add", "arguments": "{\\"a\\": 1}"}}]}',
        '{"function": {"name": "add", "arguments": {"a": 1}}}',
        'I call: [{"name": "add", "arguments": {"a": 1}}]',
    ],
)
def test_openai(text: str) -> None:
    assert calls(parse("openai", text)) == [("add", {"a": 1})]


def test_openai_leaves_prose_alone() -> None:
    for text in ("The set {1, 2} is small.", "no calls at all", '{"x": 1}'):
        found = parse("openai", text)
        assert found.content == text and not found.calls and not found.problems
    broken = parse("openai", '{"tool_calls": [{"function": ')
    assert broken.problems and not broken.calls


def test_qwen3_coder() -> None:
    text = (
        "Now.<tool_call>\n<function=run>\n<parameter=code>\nprint(1)\nprint(2)\n</parameter>\n"
        "<parameter=times>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    found = parse("qwen3_coder", text)
    assert calls(found) == [("run", {"code": "print(1)\nprint(2)", "times": 3})]
    assert found.content == "Now."
    assert parse("qwen3_coder", "<tool_call>run()</tool_call>").problems
    assert parse(
        "qwen3_coder", "<tool_call><function=a><parameter=x>1</function></tool_call>"
    ).problems


def test_gpt_oss() -> None:
    text = (
        "<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Rome"}<|call|>'
    )
    assert calls(parse("gpt-oss", text)) == [("weather", {"city": "Rome"})]
    early = '<|start|>assistant to=functions.f<|channel|>commentary<|message|>{"a": 1}<|call|>'
    assert calls(parse("gpt-oss", early)) == [("f", {"a": 1})]
    final = "<|channel|>final<|message|>It is warm.<|return|>"
    assert parse("gpt-oss", final).content == "It is warm."
    assert parse("gpt-oss", text.replace('{"city"', '{"city')).problems
    assert TOOL_PARSERS["gpt-oss"].keeps_special_tokens


def test_react() -> None:
    text = 'Thought: I must add.\nAction: add\nAction Input: {"a": 1}\nObservation: 2'
    found = parse("react", text)
    assert calls(found) == [("add", {"a": 1})]
    assert found.content == "Thought: I must add."
    assert not parse("react", "Final Answer: 2").calls
    assert parse("react", "Action: add").problems
    assert parse("react", "Action: add\nAction Input: 1 + 1").problems


CALL = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"{CALL}</tool_call>"),
        ("openai", '{"tool_calls": {}}'),
        ("openai", f'{CALL} {{"name": "add", "arguments": {{'),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter></function>"),
        ("gpt-oss", '<|channel|>commentary to=add<|message|>{"a": 1}<|call|>'),
        ("gpt-oss", '<|channel|>commentary to=functions.add{"a": 1}<|call|>'),
        ("react", 'Action add\nAction Input: {"a": 1}'),
        ("react", 'Action:\nAction Input: {"a": 1}'),
    ],
)
def test_what_is_meant_as_a_call_is_told(name: str, text: str) -> None:
    assert len(parse(name, text).problems) == 1


@pytest.mark.parametrize(
    "body",
    [
        "<parameter=a>1</parameter><parameter=b>2",
        "<parameter=a>1<parameter=b>2</parameter>",
        '{"a": 1}',
    ],
)
def test_a_parameter_of_qwen3_coder_is_not_lost(body: str) -> None:
    found = parse("qwen3_coder", f"<tool_call><function=f>{body}</function></tool_call>")
    assert not found.calls and "<parameter=KEY>VALUE</parameter>" in found.problems[0]


def test_several_functions_in_one_call_of_qwen3_coder() -> None:
    both = "<function=f></function>\n<function=g></function>"
    assert calls(parse("qwen3_coder", f"<tool_call>{both}</tool_call>")) == [("f", {}), ("g", {})]


def test_openai_finds_calls_among_other_brackets() -> None:
    found = parse("openai", f"As {{x}} in [1], {CALL}\nand {CALL}")
    assert calls(found) == [("add", {"a": 1})] * 2 and not found.problems
    assert found.content == "As {x} in [1], \nand"


def test_a_call_of_gpt_oss_on_another_channel() -> None:
    text = '<|channel|>analysis to=functions.add code<|message|>{"a": 1}<|call|>'
    assert calls(parse("gpt-oss", text)) == [("add", {"a": 1})]


ALPHABET = st.text(
    st.sampled_from('<>{}[]":,\\/|=aA1 \n') | st.characters(codec="utf-8"), max_size=60
)
PARTS = st.lists(
    ALPHABET
    | st.sampled_from(
        ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=p>",
         "</parameter>", "Action: f\n", "Action Input:", '{"name": "f", "arguments": {}}',
         "<|channel|>commentary to=functions.f<|message|>", "<|call|>", '"tool_calls"'],
    ),
    max_size=8,
)  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(PARTS, st.sampled_from(sorted(TOOL_PARSERS)))
def test_whatever_is_written_is_read_without_an_error(parts: Any, name: Any) -> None:
    found = parse(name, "".join(parts))
    for call in found.calls:
        assert isinstance(call, FunctionCall) and isinstance(json.loads(call.arguments), dict)
    assert all(isinstance(problem, str) and problem for problem in found.problems)
