"""Conversations that grow turn by turn, whose sampled tokens are never encoded again.

A model is trained on its own sampled tokens. So of a later turn only the new messages go through
the chat template, and their tokens are appended to the existing ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from caldera.data.chat import Message, render_chat, tokenize_text
from caldera.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "caldera:what-the-model-said"
TOLD = "caldera:what-it-was-told"
QUESTION: Message = {"role": "user", "content": "a"}
SAID: Message = {"role": "assistant", "content": MARK}


class Appending(Enum):
    """How a chat template takes it that turns are appended."""

    EXACT = "the tokens are those of the whole conversation, rendered at once"
    AS_SAMPLED = "the template would change earlier turns, which stay as they were sampled"


class TurnAppender:
    """The tokens of a conversation, in the chat template of a tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The tokens of a conversation, up to where the assistant begins to answer."""
        kwargs = self._kwargs | ({"tools": list(tools)} if tools else {})
        return tokenize_text(self._tokenizer, render_chat(self._tokenizer, [*messages], kwargs))

    def shows(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the template writes the tools into the prompt."""
        return self.prompt([QUESTION], tools) != self.prompt([QUESTION])

    def continuation(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """The tokens to append to a response that ends with `last_token`: the end of that turn,
        unless the model has written it itself, the new messages, and the next response's beginning.
        """
        ids = tokenize_text(self._tokenizer, self._after([QUESTION, SAID], messages))
        return ids[1:] if ids[:1] == [last_token] else ids

    def check(self, roles: Sequence[str] = ("user", "tool")) -> Appending:
        """How turns of these roles can be appended; ConfigError if they cannot."""
        found = Appending.EXACT
        for role in roles:
            new: list[Message] = [{"role": role, "content": TOLD}]
            try:
                short = self._after([QUESTION, SAID], new)
                long = self._after([QUESTION, {**SAID, "content": "c"}, QUESTION, SAID], new)
            except DataError as error:
                raise self._refusal(role, str(error)) from error
            if TOLD not in short:
                raise self._refusal(role, "it leaves out what the message says")
            if short != long:
                raise self._refusal(
                    role,
                    "what it writes for a message depends on the turns before: "
                    f"{_differing(short, long)}",
                )
            if not self._keeps_earlier_turns(new):
                found = Appending.AS_SAMPLED
        return found

    def _after(self, before: Sequence[Message], messages: Sequence[Message]) -> str:
        """The text behind the last response, whose text is the mark."""
        text = render_chat(self._tokenizer, [*before, *messages], self._kwargs)
        _, mark, after = text.partition(MARK)
        if not mark:
            raise DataError("the chat template leaves out what the assistant said")
        return after

    def _keeps_earlier_turns(self, new: Sequence[Message]) -> bool:
        """Whether rendering at once gives what appending gives, also for an earlier response that
        thinks before it speaks."""
        said = f"<think>\nd\n</think>\n\n{MARK}"
        asked = render_chat(self._tokenizer, [QUESTION], self._kwargs)
        grown = render_chat(
            self._tokenizer, [QUESTION, {**SAID, "content": said}, *new], self._kwargs
        )
        for answer in (said, said.removeprefix("<think>\n")):  # some prompts open the thought
            if grown == asked + answer + self._after([QUESTION, SAID], new):
                return True
        return False

    def _refusal(self, role: str, why: str) -> ConfigError:
        return ConfigError(
            f"the chat template of {self._tokenizer.name_or_path!r} cannot have a turn of the role "
            f"{role!r} appended: {why}. Choose another by "
            "actor_rollout_ref.model.custom_chat_template"
        )


def _differing(one: str, other: str) -> str:
    """Where two texts part, for an error message."""
    start = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    begin = max(0, start - 20)
    return f"{one[begin : start + 20]!r} or {other[begin : start + 20]!r}"
