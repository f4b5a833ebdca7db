"""The facts of its model that a server needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from caldera.rollout import SamplingParams


@dataclass(frozen=True)
class ChatModel:
    """A model, as a server speaks of it and to it."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    """Tokens from here on do not exist."""
    stop_tokens: frozenset[int]
    prompt_length: int
    """Tokens of a prompt at most."""
    response_length: int
    """Tokens of a response at most, and of one whose request has no limit."""
    max_length: int
    """Tokens of both together at most."""
    answers_to_any_name: bool = False
    """Whether a request may name another model."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=1))
    """Defaults of a request; its `max_tokens` and stop tokens are those above."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template that a request may replace."""

    @property
    def longest_prompt(self) -> int:
        """Tokens of a prompt at most, with room for a response."""
        return min(self.prompt_length, self.max_length - 1)

    @cached_property
    def most_characters(self) -> int:
        """A text of more has too many tokens: to find out how many may take minutes."""
        return self.longest_prompt * max(map(len, self.tokenizer.get_vocab()))

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def description(self) -> dict[str, object]:
        """As /v1/models shows it."""
        return {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "caldera",
            "max_model_len": self.max_length,
        }
