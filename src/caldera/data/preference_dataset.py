"""Pairs of responses to the same prompt, of which one was preferred."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from caldera.data.chat import (
    Message,
    chat_messages,
    prompt_messages,
    require_end_token,
    tokenize_chat,
    tokenize_text,
)
from caldera.data.files import Row
from caldera.data.loader import truncate
from caldera.data.sft_dataset import TableDataset
from caldera.errors import DataError

if TYPE_CHECKING:
    from caldera.config.preference import PreferenceDataConfig

Tokens = tuple[list[int], list[int]]
"""Token ids, and a mask that is 1 at each token whose next one belongs to the response."""


class PreferenceDataset(TableDataset):
    """Rows of data files, each with the tokens of a prompt and of two responses to it.

    An item has `chosen` and `rejected`, which are `Tokens`, and where `data.margin_key` is
    given `margin`, a number.

    The tokens are those that a policy would have sampled: the prompt's chat template up to where
    the assistant begins, the response's text, and the tokenizer's end token.
    """

    config: PreferenceDataConfig

    def _required(self) -> dict[str, str]:
        require_end_token(self.tokenizer)
        config = self.config
        required = {
            config.prompt_key: "data.prompt_key",
            config.chosen_key: "data.chosen_key",
            config.rejected_key: "data.rejected_key",
        }
        if config.margin_key is not None:
            required[config.margin_key] = "data.margin_key"
        return required

    def _check(self, row: int) -> None:
        self._pair(row)

    def __getitem__(self, item: int) -> Row:
        prompt, responses, margin = self._pair(item)
        where = self._table.where(item)
        try:
            asked = tokenize_chat(self.tokenizer, prompt, self.config.apply_chat_template_kwargs)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        end = self.tokenizer.eos_token_id
        said = {n: [*tokenize_text(self.tokenizer, text), end] for n, text in responses.items()}
        fields: Row = dict(self._fitted(asked, said, where))
        return fields if margin is None else {**fields, "margin": margin}

    def _pair(self, item: int) -> tuple[list[Message], dict[str, str], float | None]:
        """The messages of the prompt, the texts of the responses, and the margin."""
        config = self.config
        prompt = prompt_messages(*self._value(item, config.prompt_key, "data.prompt_key"))
        chosen = self._value(item, config.chosen_key, "data.chosen_key")
        rejected = self._value(item, config.rejected_key, "data.rejected_key")
        responses = {"chosen": _response(*chosen, prompt), "rejected": _response(*rejected, prompt)}
        if config.margin_key is None:
            return prompt, responses, None
        return prompt, responses, _margin(*self._value(item, config.margin_key, "data.margin_key"))

    def _value(self, item: int, column: str, key: str) -> tuple[Any, str]:
        """A value of the row, and what errors call it."""
        what = f"{self._table.where(item)}: the value of {column!r} ({key})"
        return self._table.rows[item][column], what

    def _fitted(
        self, prompt: list[int], responses: dict[str, list[int]], where: str
    ) -> dict[str, Tokens]:
        """Prompt and responses within `max_length` tokens.

        Cut on the left, the prompt is cut alike for both, so that they respond to the same one.
        """
        most, mode = self.config.max_length, self.config.truncation
        longest = max(len(response) for response in responses.values())
        if len(prompt) + longest > most and mode == "error":
            raise DataError(
                f"{where}: the prompt and its longer response have {len(prompt) + longest} tokens, "
                f"more than data.max_length={most}; raise that, or cut them with "
                "data.truncation=left or right"
            )
        if mode == "left":
            prompt = truncate(prompt, max(1, most - longest), mode)
        fitted = {}
        for name, response in responses.items():
            ids = truncate([*prompt, *response], most, mode)
            of_response = truncate([0] * len(prompt) + [1] * len(response), most, mode)
            mask = [*of_response[1:], 0]
            if not any(mask):
                raise DataError(
                    f"{where}: the prompt alone has {len(prompt)} tokens, so that nothing is left "
                    f"of the responses within data.max_length={most}; raise that, or keep the "
                    "responses with data.truncation=left"
                )
            fitted[name] = (ids, mask)
        return fitted


def _response(value: object, what: str, prompt: list[Message]) -> str:
    """The text of a response that is given as such, or as a message after those of the prompt."""
    if isinstance(value, str):
        return value
    messages = chat_messages(value, what)
    if messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    roles = [message["role"] for message in messages]
    text = messages[0].get("content") if roles == ["assistant"] else None
    if not isinstance(text, str):
        raise DataError(
            f"{what} must be the text of a response or one message of the assistant, with or "
            f"without the prompt's messages before it; got messages of {', '.join(roles) or 'none'}"
        )
    further = {k: v for k, v in messages[0].items() if k not in ("role", "content")}
    dropped = [field for field, value in further.items() if value not in ("", [])]
    if dropped:
        raise DataError(
            f"{what} has a message of the assistant with {', '.join(dropped)}, which cannot be "
            "trained; takes role and content"
        )
    return text


def _margin(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{what} must be a number; got {value!r}")
    return float(value)
