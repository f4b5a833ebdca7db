"""Whole conversations to tokens, and which of them the assistant wrote.

The training text is the text that the chat template makes of the whole conversation, since that is
what the model will see. Where the assistant speaks in it is found by rendering the conversation
again with a mark in place of what was said: templates add headers, drop the thinking of earlier
turns and join tool responses, so that messages rendered one by one may not add up to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2

from caldera.data.chat import Message, hf_tokenizer, render_chat, tokenize_text
from caldera.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from caldera.config.reward import RewardModelModelConfig


MARK = "caldera:the-assistant-speaks-here"
ASSISTANT = "assistant"


@dataclass(frozen=True)
class TokenRow:
    """The tokens of a sample and, of each, whether it is trained."""

    ids: list[int]
    trained: list[bool]

    def loss_mask(self) -> list[int]:
        """verl's mask, which stands at the token that predicts a trained one."""
        return [*map(int, self.trained[1:]), 0]


class ConversationMismatch(DataError):
    """A chat template in whose text the parts of a conversation cannot be distinguished."""


class ConversationTokenizer:
    """Conversations of one chat template, whose further arguments are `template_kwargs`."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs)

    def whole(self, messages: list[Message]) -> TokenRow:
        """The conversation as the template writes it; what the assistant said is trained.

        Raises ConversationMismatch where its parts, tokenized one by one, are not the tokens of the
        whole, as they would be where the model writes one part after the other has been read.
        """
        text = self._render(messages)
        pieces: list[tuple[str, bool]] = []
        done = 0
        for start, end in self._spoken(messages, text):
            pieces += [(text[done:start], False), (text[start:end], True)]
            done = end
        row = self._tokens([*pieces, (text[done:], False)])
        if row.ids != tokenize_text(self._tokenizer, text):
            raise ConversationMismatch(
                "the tokens of its messages are not those of the whole conversation"
            )
        return row

    def one_by_one(self, messages: list[Message]) -> TokenRow:
        """Every message as the template writes it alone, less the system prompt that it adds."""
        headers = self._headers()
        added = self._added_system_prompt()
        pieces: list[tuple[str, bool]] = []
        for number, message in enumerate(messages):
            text = self._render([message], with_tools=number == 0)
            if number > 0 and message["role"] != "system":
                text = text.removeprefix(added)
            cut = next((text.find(one) + len(one) for one in headers if one in text), 0)
            cut = cut if message["role"] == ASSISTANT else len(text)
            pieces += [(text[:cut], False), (text[cut:], True)]
        return self._tokens(pieces)

    def _spoken(self, messages: list[Message], text: str) -> Iterator[tuple[int, int]]:
        """Where each message of the assistant stands in the text, behind its header."""
        done = 0
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            calls = {k: v for k, v in message.items() if k == "tool_calls"}
            marked = [*messages]
            marked[number] = {"role": ASSISTANT, "content": MARK, **calls}
            before, _, after = self._render(marked).partition(MARK)
            closing = self._render(marked[: number + 1]).partition(MARK)[2]
            start = self._end_of_header(before, done)
            rest = after[len(closing) :]
            end = len(text) - len(rest)
            fits = after.startswith(closing) and text.endswith(rest) and start is not None
            if not fits or start is None or text[:start] != before[:start] or start > end:
                raise ConversationMismatch(
                    f"message {number}, the assistant's, cannot be found in what the chat template "
                    f"makes of the whole conversation{self._unasked_thinking(messages)}"
                )
            yield start, end
            done = end

    def _unasked_thinking(self, messages: list[Message]) -> str:
        """The hint of a mismatch where the conversation would fit a template that may think."""
        if self._kwargs.get("enable_thinking", True):
            return ""
        thinking = ConversationTokenizer(self._tokenizer, {**self._kwargs, "enable_thinking": True})
        try:
            list(thinking._spoken(messages, thinking._render(messages)))
        except ConversationMismatch:
            return ""
        return ": it thinks, and enable_thinking=False has the template write that it did not"

    def _end_of_header(self, before: str, done: int) -> int | None:
        """Where the last generation prompt in the text ends."""
        for header in self._headers():
            place = before.rfind(header, done)
            if place >= 0:
                return place + len(header)
        return None

    def _headers(self) -> list[str]:
        """The generation prompt, then that of a template without an option for thinking: responses
        that are not the last ones may have the latter."""
        plain = {k: v for k, v in self._kwargs.items() if k != "enable_thinking"}
        return [header for kwargs in (self._kwargs, plain) if (header := self._header(kwargs))]

    def _header(self, kwargs: Mapping[str, Any]) -> str:
        """The generation prompt."""
        asked: list[Message] = [{"role": "user", "content": "a"}]
        without = render_chat(self._tokenizer, asked, kwargs, add_generation_prompt=False)
        return render_chat(self._tokenizer, asked, kwargs).removeprefix(without)

    def _added_system_prompt(self) -> str:
        """The template's text before a first message that is none of the system's."""
        asked: Message = {"role": "user", "content": "a"}
        one, two = (self._render([asked] * count, with_tools=False) for count in (1, 2))
        return one.removesuffix(two[len(one) :])

    def _render(self, messages: list[Message], with_tools: bool = True) -> str:
        kwargs = {k: v for k, v in self._kwargs.items() if with_tools or k != "tools"}
        return render_chat(self._tokenizer, messages, kwargs, add_generation_prompt=False)

    def _tokens(self, pieces: Sequence[tuple[str, bool]]) -> TokenRow:
        ids: list[int] = []
        trained: list[bool] = []
        for text, is_trained in pieces:
            own = tokenize_text(self._tokenizer, text)
            ids += own
            trained += [is_trained] * len(own)
        return TokenRow(ids, trained)


# ---- Conversations that end with a response, in the words of a reward model's own chat template

PATH_KEY = "reward_model.model.path"


def reward_model_tokenizer(config: RewardModelModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer in the reward model's own folder."""
    return hf_tokenizer(config.path or "", trust_remote_code=config.trust_remote_code, key=PATH_KEY)


def require_own_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise unless the reward model's tokenizer can render conversations."""
    if tokenizer.chat_template is None:
        raise DataError(f"{PATH_KEY}={tokenizer.name_or_path!r}: no chat template")


def conversation_text(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], answer: str
) -> str:
    """The chat with the assistant's response as its last message."""
    conversation = [*messages, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=False
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise DataError(
            f"the reward model's chat template failed on a conversation: {error}"
        ) from error
    assert isinstance(text, str)
    return text


def conversation_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    answer: str,
    max_length: int | None,
) -> list[int]:
    """The tokens of that text; those beyond `max_length` are dropped."""
    return tokenize_text(tokenizer, conversation_text(tokenizer, messages, answer))[:max_length]
