"""Tool calls in what a model wrote; one that cannot be read is data too, and told the model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from caldera.errors import UnsupportedError
from caldera.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TOOL_PARSERS", "FunctionCall", "ParsedCalls", "ToolParser", "read_arguments"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FunctionCall:
    """A call that the model asks for."""

    name: str
    arguments: str
    """A JSON object, as text."""
    texts: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Arguments as they were written, in a format that does not tell texts from other values."""


@dataclass
class ParsedCalls:
    """What an answer holds: the text around the calls, the calls, and what could not be read."""

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

        What a parser trips over was written by the model, and is told it.
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
        "%s could not read an answer, %s, which the model was told; more of this kind are not "
        "logged", parser, error,
    )  # fmt: skip


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
