"""The formats of tool calls."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from html import unescape
from typing import TYPE_CHECKING, Any, TypeVar

from caldera.errors import UnsupportedError
from caldera.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


# ---- Tool calls in what a model wrote; one that cannot be read is data too, and told the model


@dataclass(frozen=True)
class FunctionCall:
    """A call that the model asks for."""

    name: str
    arguments: str
    """A JSON object, as text."""
    texts: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Arguments as they were written, in a format that marks no texts."""


@dataclass
class ParsedCalls:
    """The parts of a response: the text around the calls, the calls, and the unreadable rest."""

    content: str
    calls: list[FunctionCall] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """One sentence for each call that is malformed, for the model to read."""


class ToolParser:
    """Reads one format of tool calls, by `parse_text` or, as verl's do, by `extract_tool_calls`."""

    keeps_special_tokens = False
    """Whether the format is made of special tokens, which decoding must not drop."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @staticmethod
    def register(name: str) -> Callable[[Parser], Parser]:
        """Decorate a parser's class to have it chosen by `multi_turn.format`."""

        def add(parser: Parser) -> Parser:
            TOOL_PARSERS.register(name)(parser)
            return parser

        return add

    async def read(self, token_ids: list[int]) -> ParsedCalls:
        """The calls in what the model sampled, whichever way the class reads them.

        The model wrote what a parser fails on, and gets the message.
        """
        try:
            if type(self).extract_tool_calls is ToolParser.extract_tool_calls:
                return self.parse(token_ids)
            return ParsedCalls(*await self.extract_tool_calls(token_ids))
        except Exception as error:  # noqa: BLE001 -- such as brackets nested too deeply
            _warn_once(type(self).__name__, type(error).__name__)
            content = str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
            problem = f"the tool calls could not be read: {type(error).__name__}: {error}"
            return ParsedCalls(content, problems=[problem])

    def parse(self, token_ids: list[int]) -> ParsedCalls:
        """The calls in what the model sampled."""
        skip = not self.keeps_special_tokens
        return self.parse_text(str(self.tokenizer.decode(token_ids, skip_special_tokens=skip)))

    def parse_text(self, text: str) -> ParsedCalls:
        """The calls in a text."""
        raise UnsupportedError(
            f"the parser of tool calls {type(self).__name__} cannot read text: it has no parse_text"
        )

    async def extract_tool_calls(self, responses_ids: list[int]) -> tuple[str, list[FunctionCall]]:
        """(the text without the calls, the calls), as verl's parsers are asked."""
        found = self.parse(responses_ids)
        return found.content, found.calls


Parser = TypeVar("Parser", bound=type[ToolParser])

TOOL_PARSERS: Registry[type[ToolParser]] = Registry("actor_rollout_ref.rollout.multi_turn.format")


@cache  # models do it by the hundred
def _warn_once(parser: str, error: str) -> None:
    logger.warning(
        "%s could not parse a response, %s, which the model got back; more of this kind are not "
        "logged",
        parser,
        error,
    )


def read_call(text: str, into: ParsedCalls) -> None:
    """Read `{"name": ..., "arguments": {...}}`, or say what is wrong with it."""
    try:
        said = json.loads(text)
    except ValueError as error:
        into.problems.append(f"the tool call is not valid JSON ({error}): {_short(text)}")
        return
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        into.problems.append(f"a tool call needs a 'name' that is text: {_short(text)}")
        return
    read_arguments(said["name"], said.get("arguments", said.get("parameters", {})), into)


def read_arguments(
    name: str, arguments: Any, into: ParsedCalls, texts: Mapping[str, str] | None = None
) -> None:
    """Take in a call whose arguments are an object, or JSON text of one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            into.problems.append(
                f"the arguments of {name} are not valid JSON ({error}): {_short(arguments)}"
            )
            return
    if not isinstance(arguments, dict):
        into.problems.append(
            f"the arguments of {name} must be an object with a value for each parameter, "
            f"got {_short(json.dumps(arguments))}"
        )
        return
    into.calls.append(FunctionCall(name, json.dumps(arguments, ensure_ascii=False), texts or {}))


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= 200 else f"{text[:200]}..."


OPENING, CLOSING = "<tool_call>", "</tool_call>"


def _tagged(text: str) -> tuple[str, list[str], list[str]]:
    """(text outside, the insides of `<tool_call>` tags, what is wrong with the tags)."""
    outside: list[str] = []
    insides: list[str] = []
    problems: list[str] = []
    while True:
        before, opening, rest = text.partition(OPENING)
        outside.append(before)
        if CLOSING in before:
            problems.append(f"{CLOSING} does not follow {OPENING}")
        if not opening:
            return "".join(outside).strip(), insides, problems
        inside, closing, text = rest.partition(CLOSING)
        if closing:
            insides.append(inside)
        else:
            problems.append(f"{OPENING} is not followed by {CLOSING}")


@TOOL_PARSERS.register("hermes")
class Hermes(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

    def parse_text(self, text: str) -> ParsedCalls:
        content, insides, problems = _tagged(text)
        found = ParsedCalls(content)
        for inside in insides:
            read_call(inside, found)
        found.problems += problems
        return found


@TOOL_PARSERS.register("openai")
class OpenAI(ToolParser):
    """JSON as of OpenAI's interface: an object with `tool_calls`, a list of calls, or one call;
    any number of these, with other text around them."""

    BEGINNING = re.compile(r"[{\[]")

    def parse_text(self, text: str) -> ParsedCalls:
        found = ParsedCalls("")
        outside: list[str] = []
        kept, place = 0, 0  # text before these is in `outside` or read, and looked at
        wrong: ValueError | None = None
        while (beginning := self.BEGINNING.search(text, place)) is not None:
            start = beginning.start()
            try:
                said, place = json.JSONDecoder().raw_decode(text, start)
            except ValueError as error:
                wrong = wrong or error
                # Of a number that is too long for Python, nothing shows where it stands.
                if self._is_about_calls(text[start : getattr(error, "pos", None)]):
                    found.problems.append(f"the JSON is not valid: {error}")
                    outside.append(text[kept:start])
                    kept = len(text)
                    break
                place = start + 1  # a brace of prose
                continue
            calls = self._calls(said)
            if calls is not None:
                outside.append(text[kept:start])
                kept = place
                self._take(calls, found)
        outside.append(text[kept:])
        found.content = "".join(outside).strip()
        if wrong and not found.calls and not found.problems and self._is_about_calls(text):
            found.problems.append(f"the JSON is not valid: {wrong}")
        return found

    @staticmethod
    def _is_about_calls(text: str) -> bool:
        return '"tool_calls"' in text or '"arguments"' in text

    @staticmethod
    def _take(calls: list[Any], found: ParsedCalls) -> None:
        for call in calls:
            function = call.get("function", call) if isinstance(call, dict) else call
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                found.problems.append(f"a tool call needs a function with a 'name': {call!r}")
                continue
            read_arguments(function["name"], function.get("arguments", {}), found)

    @staticmethod
    def _calls(said: Any) -> list[Any] | None:
        if isinstance(said, dict) and "tool_calls" in said:
            given = said["tool_calls"]
            return given if isinstance(given, list) else [given]
        if isinstance(said, dict) and ("function" in said or "arguments" in said):
            return [said]
        if isinstance(said, list) and said and all(isinstance(call, dict) for call in said):
            return said
        return None


@TOOL_PARSERS.register("qwen3_coder")
class Qwen3Coder(ToolParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`.

    Values are JSON where they can be read so, otherwise text; a parameter that is a text gets what
    was written.
    """

    FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
    PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)

    def parse_text(self, text: str) -> ParsedCalls:
        content, insides, problems = _tagged(text)
        found = ParsedCalls(content)
        for inside in insides:
            functions = self.FUNCTION.findall(inside)
            if not functions or self.FUNCTION.sub("", inside).strip():
                found.problems.append(
                    "a tool call needs <function=NAME> and </function>, with "
                    "<parameter=KEY>VALUE</parameter> for each parameter"
                )
                continue
            for name, body in functions:
                self._read(name, body, found)
        found.problems += problems
        if "<function=" in content and not found.calls and not found.problems:
            found.problems.append(f"a tool call stands between {OPENING} and {CLOSING}")
        return found

    def _read(self, name: str, body: str, found: ParsedCalls) -> None:
        pairs = self.PARAMETER.findall(body)
        is_unclosed = any("<parameter=" in value for _, value in pairs)
        if is_unclosed or self.PARAMETER.sub("", body).strip():
            found.problems.append(
                f"{name} takes nothing but <parameter=KEY>VALUE</parameter>, for each parameter"
            )
            return
        texts = {key: unescape(value.removeprefix("\n").removesuffix("\n")) for key, value in pairs}
        values = {key: self._value(text) for key, text in texts.items()}
        read_arguments(name, values, found, texts)

    @staticmethod
    def _value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text


@TOOL_PARSERS.register("gpt-oss")
class GptOss(ToolParser):
    """Harmony: messages to `functions.NAME`, on whatever channel, which end with a call."""

    keeps_special_tokens = True
    CALL = re.compile(
        r"(?:<\|start\|>assistant)?"
        r"(?: to=(?P<early>[\w.-]+))?<\|channel\|>\w+"
        r"(?: to=(?P<late>[\w.-]+))?[^<]*(?:<\|constrain\|>[^<]*)?"
        r"<\|message\|>(?P<arguments>.*?)(?:<\|call\|>|<\|end\|>|<\|return\|>|$)",
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
            recipient = call["early"] or call["late"]
            if recipient is None:
                continue  # for people, or the model itself
            name = recipient.removeprefix("functions.")
            if name == recipient:
                found.problems.append(f"a call goes to functions.NAME, not to {recipient}")
                continue
            arguments = self.SPECIAL.sub("", call["arguments"])
            read_arguments(name, arguments.strip(), found)
        if "<|call|>" in text and not found.calls and not found.problems:
            found.problems.append(
                "a call needs to=functions.NAME, and its arguments after <|message|>"
            )
        return found


@TOOL_PARSERS.register("react")
class React(ToolParser):
    """`Action: NAME` and `Action Input: {...}` on lines of their own, one call an answer."""

    ACTION = re.compile(r"^[ \t]*Action[ \t]*:[ \t]*(.+?)[ \t]*$", re.MULTILINE)
    INPUT = re.compile(r"^[ \t]*Action Input[ \t]*:[ \t]*", re.MULTILINE)

    def parse_text(self, text: str) -> ParsedCalls:
        action = self.ACTION.search(text)
        if action is None:
            found = ParsedCalls(text.strip())
            if self.INPUT.search(text):
                found.problems.append("'Action Input' must follow 'Action: NAME' on a line before")
            return found
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
