"""Conversations that grow turn by turn, whose sampled tokens are never encoded again.

A model is trained on its own sampled tokens. So of a later turn only the new messages go through
the chat template, and their tokens are appended to the existing ones.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from caldera.errors import ConfigError, DataError
from caldera.storage import local_path
from caldera.storage.paths import WEIGHT_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


Message = dict[str, Any]

_EXPECTED = "a list of messages such as [{'role': 'user', 'content': 'What is 1 + 1?'}]"


def prompt_messages(value: object, what: str) -> list[Message]:
    """Fresh messages from a prompt, of which plain text is one message of the user."""
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{what} is empty text")
        return [{"role": "user", "content": value}]
    return chat_messages(value, what, "text, or ")


def chat_messages(value: object, what: str, also: str = "") -> list[Message]:
    """Fresh messages from the value of a prompt column; `what` names the value in errors, and
    `also` other values that it may have.

    Columns of parquet files hold None wherever one message lacks a field that another one has.
    A chat template takes such a field for given, so it is left out here.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{what} must be {also}{_EXPECTED}; got {_shown(value)}")
    return [_message(item, f"message {number} of {what}") for number, item in enumerate(value)]


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    template_kwargs: Mapping[str, Any],
    add_generation_prompt: bool = True,
) -> str:
    """The text of a chat, by default up to where the assistant begins to respond."""
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
        )
    except (jinja2.TemplateError, TypeError) as error:
        what = "prompt" if add_generation_prompt else "conversation"
        raise DataError(f"the chat template failed on the {what}: {error}") from error
    assert isinstance(text, str)
    return text


def tokenize_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a rendered chat; the template has put the special tokens in already."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def tokenize_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    template_kwargs: Mapping[str, Any],
) -> list[int]:
    """The prompt tokens of a chat."""
    return tokenize_text(tokenizer, render_chat(tokenizer, messages, template_kwargs))


def tokenize_bare(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a prompt outside of any chat: as the tokenizer begins a text, and not ended."""
    ids = list(tokenizer.encode(text))
    return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids


def has_chat_template(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> bool:
    return tokenizer.chat_template is not None or "chat_template" in template_kwargs


def require_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
    key: str = "actor_rollout_ref.model.custom_chat_template",
) -> None:
    """Raise unless prompts can be rendered at all; `key` would give a template."""
    if not has_chat_template(tokenizer, template_kwargs):
        raise DataError(f"the tokenizer {tokenizer.name_or_path!r} has no chat template; set {key}")


def require_end_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise unless responses can be ended."""
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer {tokenizer.name_or_path!r} has no end token")


def _message(item: object, what: str) -> Message:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise DataError(f"{what} must be part of {_EXPECTED}; got {_shown(item)}")
    message = {field: value for field, value in item.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = [_content_part(part) for part in content]
    elif not isinstance(content, str) and "tool_calls" not in message:
        raise DataError(f"the content of {what} must be a string; got {_shown(content)}")
    return message


def _content_part(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return {field: value for field, value in part.items() if value is not None}


def _shown(value: object) -> str:
    text = repr(value)
    return f"a {type(value).__name__}: {text if len(text) <= 80 else text[:77] + '...'}"


# ---- Loading of tokenizers


def hf_tokenizer(
    path: str,
    trust_remote_code: bool = False,
    custom_chat_template: str | None = None,
    key: str = "tokenizer",
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, a URL or a Hugging Face model name, with a padding token.

    `key` is the config key that the path came from, for errors.
    """
    from transformers import AutoTokenizer

    path = local_path(path, key, WEIGHT_FILES)
    folder = Path(path).expanduser()
    is_local = folder.exists()
    if not is_local and _must_be_local(path):
        raise DataError(f"{key}={path!r}: the folder {folder} does not exist")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder) if is_local else path, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        tried = f"the folder {folder.absolute()}"
        if not is_local:
            tried += " (which does not exist) and the Hugging Face hub"
        first = str(error).splitlines()[0]
        raise DataError(f"{key}={path!r}: no tokenizer; tried {tried}: {first}") from error
    _ensure_pad_token(tokenizer, path)
    if custom_chat_template is not None:
        tokenizer.chat_template = custom_chat_template
    return tokenizer


def _must_be_local(path: str) -> bool:
    # A name on the hub is `model` or `owner/model`.
    return path.startswith(("/", "~", ".")) or path.count("/") > 1


def _ensure_pad_token(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    if tokenizer.pad_token_id is not None:
        return
    if tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer {path!r} has neither a padding nor an end-of-text token")
    tokenizer.pad_token = tokenizer.eos_token
    _warn_no_pad_token(path, str(tokenizer.eos_token))


@cache  # once a tokenizer
def _warn_no_pad_token(path: str, eos_token: str) -> None:
    logger.warning("tokenizer %r has no padding token; padding with %s", path, eos_token)


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
