"""Conversations that end with an answer, in the words of a reward model's own chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jinja2

from caldera.data.chat import Message, tokenize_text
from caldera.data.tokenizer import hf_tokenizer
from caldera.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from caldera.config.reward import RewardModelModelConfig

__all__ = [
    "conversation_text",
    "conversation_tokens",
    "require_own_template",
    "reward_model_tokenizer",
]

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
    """The chat with the assistant's answer as its last message."""
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
