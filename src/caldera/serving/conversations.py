"""Prompts of chats, in which a response that was sampled here keeps its tokens.

A client sends back text. Encoded again it may become other tokens than the model chose, and
the log-probs that were recorded would be of something that no prompt holds. So the tokens of every
response of a session are remembered, and put where a message repeats it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from caldera.data.chat import (
    QUESTION,
    Message,
    TurnAppender,
    chat_messages,
    render_chat,
    tokenize_text,
)
from caldera.errors import ConfigError, DataError
from caldera.serving.chat_model import ChatModel
from caldera.serving.reading import BadField, Fields, check_characters, tools_of

# ---- What a server must know of its model


RENDERING = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
TAKEN = {"messages", *RENDERING} - {"documents", "kwargs"}
"""Arguments of a template's rendering that are none of the template's own."""
FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, ValueError)
"""Errors of a template's code, beside its own, on input that it was not written for."""


@dataclass(frozen=True)
class Chat:
    """A conversation, and all else that decides how it is rendered."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def keys(self) -> list[str]:
        """The keys of its beginnings: that of no message, of one, of two, and so on."""
        keys = [_digest([self.tools, self.template_kwargs])]
        for message in self.messages:
            keys.append(_digest([keys[-1], _essence(message)]))
        return keys

    def key_with(self, answer: Message) -> str:
        """Its key once the response is part of it."""
        return _digest([self.keys()[-1], _essence(answer)])


@dataclass
class Sampled:
    """The responses of a session."""

    grown: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    """Of a chat that ends with such a response: (the prompt's tokens, the response's)."""
    answers: dict[str, list[int]] = field(default_factory=dict)
    """A response's tokens, by its content."""

    def remember(self, chat: Chat, answer: Message, prompt: list[int], tokens: list[int]) -> None:
        self.grown[chat.key_with(answer)] = (prompt, tokens)
        self.answers[_digest(_essence(answer))] = tokens

    def tokens_of(self, message: Message) -> list[int] | None:
        if message.get("role") != "assistant":
            return None
        return self.answers.get(_digest(_essence(message)))


class ChatPrompts:
    """Renders chats in the template of a model."""

    def __init__(self, model: ChatModel) -> None:
        self._model = model
        self._tokenizer = model.tokenizer
        self.cannot_append = self._why_not()
        """Why turns cannot be put behind tokens that are there; None: they can."""

    def tokens(self, chat: Chat, sampled: Sampled) -> tuple[list[int], int]:
        """(The prompt of a chat, how many responses had to be encoded again for it).

        It begins with the tokens of an earlier prompt and its response if the chat does.
        """
        said = {
            place: tokens
            for place, message in enumerate(chat.messages)
            if (tokens := sampled.tokens_of(message)) is not None
        }
        keys = chat.keys()
        for place in sorted(said, reverse=True):
            grown = sampled.grown.get(keys[place + 1])
            if grown is None or self.cannot_append is not None:
                continue
            try:
                return self._continued(chat, said, place, *grown)
            except DataError:  # the template wants to see the whole chat
                break
        return self._whole(chat, said)

    def _continued(
        self,
        chat: Chat,
        said: Mapping[int, list[int]],
        place: int,
        prompt: list[int],
        answer: list[int],
    ) -> tuple[list[int], int]:
        """The tokens up to the response at that place, and behind them all that follows it. What a
        template writes there does not depend on what was before."""
        rest = {later - place + 1: tokens for later, tokens in said.items() if later > place}
        messages = [QUESTION, chat.messages[place], *chat.messages[place + 1 :]]
        parts, shown = self._parts(messages, {1: answer, **rest}, chat.template_kwargs)
        if 1 not in shown:
            raise DataError("the chat template leaves out what the assistant said")
        ids = self._joined(parts[1:], list(shown.values()))
        return prompt + ids, len(rest) + 1 - len(shown)

    def _whole(self, chat: Chat, said: Mapping[int, list[int]]) -> tuple[list[int], int]:
        kwargs = {**chat.template_kwargs, **({"tools": chat.tools} if chat.tools else {})}
        try:
            parts, shown = self._parts(chat.messages, said, kwargs)
        except DataError:
            if not said:
                raise
            parts, shown = self._parts(chat.messages, {}, kwargs)
        first = tokenize_text(self._tokenizer, parts[0])
        ids = self._joined(parts[1:], list(shown.values()))
        return first + ids, len(said) - len(shown)

    def _parts(
        self, messages: Sequence[Message], said: Mapping[int, list[int]], kwargs: Mapping[str, Any]
    ) -> tuple[list[str], dict[int, list[int]]]:
        """(The text before, between and behind those responses, the responses that it shows)."""
        nonce = uuid.uuid4().hex  # nobody has said it before
        marks = {place: f"{nonce}-{place}-" for place in sorted(said)}
        marked = [
            {"role": "assistant", "content": marks[place]} if place in marks else message
            for place, message in enumerate(messages)
        ]
        text = self._rendered(marked, kwargs)
        hidden = [place for place, mark in marks.items() if text.count(mark) != 1]
        if hidden:  # the template shows them in another form, or not at all
            kept = {place: tokens for place, tokens in said.items() if place not in hidden}
            return self._parts(messages, kept, kwargs)
        parts = []
        for mark in marks.values():
            before, _, text = text.partition(mark)
            parts.append(before)
        return [*parts, text], {place: said[place] for place in marks}

    def _rendered(self, messages: list[Message], kwargs: Mapping[str, Any]) -> str:
        try:
            text = render_chat(self._tokenizer, messages, kwargs)
        except DataError:
            raise
        except FAILURES as error:
            told = f"{type(error).__name__}: {error}"
            raise DataError(f"the chat template failed on the messages: {told}") from error
        check_characters(text, self._model)
        return text

    def _joined(self, parts: Sequence[str], answers: Sequence[list[int]]) -> list[int]:
        """Responses, each with the part behind it; the end of a turn is not written twice."""
        ids: list[int] = []
        for answer, part in zip(answers, parts, strict=True):
            following = tokenize_text(self._tokenizer, part)
            ids += answer
            ids += following[1:] if following[:1] == answer[-1:] else following
        return ids

    def _why_not(self) -> str | None:
        if self._tokenizer.chat_template is None:
            return None  # there are no chats
        try:
            TurnAppender(self._tokenizer).check(("user",))
        except ConfigError as error:
            return str(error)
        return None


def read_chat(fields: Fields, defaults: Mapping[str, Any]) -> Chat:
    """The chat of a request, in the form that templates take; `defaults` are arguments of the
    template that the request may replace."""
    messages = template_messages(fields.get("messages"))
    kwargs = fields.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise BadField("chat_template_kwargs", kwargs, "takes a JSON object")
    if taken := set(kwargs) & TAKEN:
        takes = f"{', '.join(sorted(taken))} cannot be set there"
        raise BadField("chat_template_kwargs", kwargs, takes)
    return Chat(messages, tools_of(fields), {**defaults, **kwargs})


def template_messages(given: Any) -> list[Message]:
    """Messages of OpenAI's protocol in the form that templates take."""
    messages = chat_messages(given, "messages")
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = "".join(map(_text_part, message["content"]))
        message.setdefault("content", "")  # beside calls of tools
        if "tool_calls" in message:
            message["tool_calls"] = _calls(message["tool_calls"])
    return messages


def _text_part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise DataError(f"a part of a message is {part!r:.100}: takes {{'type': 'text', ...}}")
    return text


def _calls(given: Any) -> list[dict[str, Any]]:
    """Calls of tools with their arguments as objects: templates write them as JSON themselves."""
    calls = []
    for call in given if isinstance(given, list) else [given]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"tool_calls of a message: {call!r:.100} has no function with a name")
        arguments = function.get("arguments", "{}")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError as error:
                raise DataError(f"arguments of {function['name']} are no JSON: {error}") from error
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def _essence(message: Message) -> Any:
    """The identity of a message: of a response, its text and the calls in it."""
    if message.get("role") != "assistant":
        return message
    functions = [call["function"] for call in message.get("tool_calls", [])]
    said = message.get("content", "").strip()  # clients may have done so, too
    return [said, [[function["name"], function.get("arguments")] for function in functions]]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
