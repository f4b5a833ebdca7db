"""The formats of tool calls."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any

from caldera.tools.parsing import (
    TOOL_PARSERS,
    ParsedCalls,
    ToolParser,
    read_arguments,
    read_call,
)

__all__ = ["GptOss", "Hermes", "OpenAI", "Qwen3Coder", "React"]

OPENING, CLOSING = "<tool_call>", "</tool_call>"


def _tagged(text: str) -> tuple[str, list[str], list[str]]:
    """(text outside, the insides of `<tool_call>` tags, insides of those that are not closed)."""
    outside: list[str] = []
    insides: list[str] = []
    unclosed: list[str] = []
    while True:
        before, opening, rest = text.partition(OPENING)
        outside.append(before)
        if not opening:
            return "".join(outside).strip(), insides, unclosed
        inside, closing, after = rest.partition(CLOSING)
        (insides if closing else unclosed).append(inside)
        text = after


@TOOL_PARSERS.register("hermes")
class Hermes(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

    def parse_text(self, text: str) -> ParsedCalls:
        content, insides, unclosed = _tagged(text)
        found = ParsedCalls(content)
        for inside in insides:
            read_call(inside, found)
        found.problems += [f"{OPENING} is not followed by {CLOSING}" for _ in unclosed]
        return found


@TOOL_PARSERS.register("openai")
class OpenAI(ToolParser):
    """JSON as of OpenAI's interface: an object with `tool_calls`, a list of calls, or one call."""

    def parse_text(self, text: str) -> ParsedCalls:
        start = min((text.find(c) for c in "{[" if c in text), default=-1)
        if start < 0:
            return ParsedCalls(text.strip())
        try:
            said, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError as error:
            if '"tool_calls"' not in text and '"arguments"' not in text:
                return ParsedCalls(text.strip())  # braces of prose
            return ParsedCalls(text[:start].strip(), problems=[f"the JSON is not valid: {error}"])
        calls = self._calls(said)
        if calls is None:
            return ParsedCalls(text.strip())
        found = ParsedCalls((text[:start] + text[end:]).strip())
        for call in calls:
            function = call.get("function", call) if isinstance(call, dict) else call
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                found.problems.append(f"a tool call needs a function with a 'name': {call!r}")
                continue
            read_arguments(function["name"], function.get("arguments", {}), found)
        return found

    @staticmethod
    def _calls(said: Any) -> list[Any] | None:
        if isinstance(said, dict) and isinstance(said.get("tool_calls"), list):
            return list(said["tool_calls"])
        if isinstance(said, dict) and ("function" in said or "arguments" in said):
            return [said]
        if isinstance(said, list) and said and all(isinstance(call, dict) for call in said):
            return said
        return None


@TOOL_PARSERS.register("qwen3_coder")
class Qwen3Coder(ToolParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`.

    Values are JSON where they can be read so, otherwise text.
    """

    FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
    PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)

    def parse_text(self, text: str) -> ParsedCalls:
        content, insides, unclosed = _tagged(text)
        found = ParsedCalls(content)
        for inside in insides:
            function = self.FUNCTION.search(inside)
            if function is None:
                found.problems.append(
                    "a tool call needs <function=NAME> and </function>, with "
                    "<parameter=KEY>VALUE</parameter> for each parameter"
                )
                continue
            name, body = function.groups()
            pairs = self.PARAMETER.findall(body)
            if not pairs and "<parameter" in body:
                found.problems.append(f"a parameter of {name} is not closed by </parameter>")
                continue
            read_arguments(name, {key: self._value(value) for key, value in pairs}, found)
        found.problems += [f"{OPENING} is not followed by {CLOSING}" for _ in unclosed]
        return found

    @staticmethod
    def _value(text: str) -> Any:
        text = unescape(text.removeprefix("\n").removesuffix("\n"))
        try:
            return json.loads(text)
        except ValueError:
            return text


@TOOL_PARSERS.register("gpt-oss")
class GptOss(ToolParser):
    """Harmony: messages to `functions.NAME` on the channel `commentary`, which end with a call."""

    keeps_special_tokens = True
    CALL = re.compile(
        r"(?:<\|start\|>assistant)?"
        r"(?: to=functions\.(?P<early>[\w.-]+))?<\|channel\|>commentary"
        r"(?: to=functions\.(?P<late>[\w.-]+))?[^<]*(?:<\|constrain\|>[^<]*)?"
        r"<\|message\|>(?P<arguments>.*?)(?:<\|call\|>|$)",
        re.DOTALL,
    )
    SPECIAL = re.compile(r"<\|[a-z_]+\|>")
    FINAL = re.compile(
        r"<\|channel\|>final<\|message\|>(.*?)(?:<\|return\|>|<\|end\|>|$)", re.DOTALL
    )

    def parse_text(self, text: str) -> ParsedCalls:
        final = self.FINAL.search(text)
        found = ParsedCalls(final.group(1).strip() if final else "")
        for call in self.CALL.finditer(text):
            name = call["early"] or call["late"]
            if name is None:
                continue  # commentary for people
            arguments = self.SPECIAL.sub("", call["arguments"])
            read_arguments(name, arguments.strip(), found)
        return found


@TOOL_PARSERS.register("react")
class React(ToolParser):
    """`Action: NAME` and `Action Input: {...}` on lines of their own, one call an answer."""

    ACTION = re.compile(r"^[ \t]*Action[ \t]*:[ \t]*(.+?)[ \t]*$", re.MULTILINE)
    INPUT = re.compile(r"^[ \t]*Action Input[ \t]*:[ \t]*", re.MULTILINE)

    def parse_text(self, text: str) -> ParsedCalls:
        action = self.ACTION.search(text)
        if action is None:
            return ParsedCalls(text.strip())
        found = ParsedCalls(text[: action.start()].strip())
        given = self.INPUT.search(text, action.end())
        if given is None:
            found.problems.append(
                "'Action: NAME' must be followed by 'Action Input: {...}' on a line of its own"
            )
            return found
        said = text[given.end() :].strip()
        try:
            arguments, _ = json.JSONDecoder().raw_decode(said)
        except ValueError as error:
            found.problems.append(f"the Action Input is not valid JSON ({error})")
            return found
        read_arguments(action.group(1), arguments, found)
        return found
