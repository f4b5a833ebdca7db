"""Chat messages to prompt tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jinja2

from caldera.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

_EXPECTED = "a list of messages such as [{'role': 'user', 'content': 'What is 1 + 1?'}]"


def chat_messages(value: object, what: str) -> list[Message]:
    """Fresh messages from the value of a prompt column; `what` names the value in errors.

    Columns of parquet files hold None wherever one message lacks a field that another one has.
    A chat template takes such a field for given, so it is left out here.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{what} must be {_EXPECTED}; got {_shown(value)}")
    return [_message(item, f"message {number} of {what}") for number, item in enumerate(value)]


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    template_kwargs: Mapping[str, Any],
    add_generation_prompt: bool = True,
) -> str:
    """The text of a chat, up to where the assistant begins to answer unless told otherwise."""
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


def require_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
    key: str = "actor_rollout_ref.model.custom_chat_template",
) -> None:
    """Raise unless prompts can be rendered at all; `key` would give a template."""
    if tokenizer.chat_template is None and "chat_template" not in template_kwargs:
        raise DataError(f"the tokenizer {tokenizer.name_or_path!r} has no chat template; set {key}")


def require_end_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise unless answers can be ended."""
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
