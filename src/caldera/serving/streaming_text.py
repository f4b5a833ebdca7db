"""Text that appears token by token."""

from __future__ import annotations

from collections.abc import Sequence

from caldera.rollout import SamplingParams
from caldera.serving.chat_model import ChatModel

UNFINISHED = "\ufffd"
"""How a decoder shows bytes that are no character yet."""


class StreamingText:
    """Turns tokens into text that is never taken back: a character comes when all of its bytes
    are there, and what may be the beginning of a stop string when it has turned out not to be."""

    def __init__(self, model: ChatModel, params: SamplingParams) -> None:
        self._model = model
        self._ends = frozenset() if params.ignore_eos else params.stop_token_ids
        self._stops = params.stop
        self._tokens: list[int] = []
        # Tokens from `_begin` to `_decoded` are decoded once more, since a decoder may write a
        # token in another way behind others, such as without the space before it.
        self._begin = self._decoded = 0
        self._held = ""
        self._told = 0

    def add(self, tokens: Sequence[int]) -> str:
        """The text that can be told now."""
        self._tokens += [token for token in tokens if token not in self._ends]
        known = self._model.text(self._tokens[self._begin : self._decoded])
        now = self._model.text(self._tokens[self._begin :])
        if now.endswith(UNFINISHED):
            return ""
        self._begin, self._decoded = self._decoded, len(self._tokens)
        return self._tell(self._held + now[len(known) :])

    def rest(self, whole: str) -> str:
        """What is left to tell, once it is known what was written in all."""
        return whole[self._told :]

    def _tell(self, text: str) -> str:
        ends = [text.find(stop) for stop in self._stops if stop in text]
        cut = min(ends) if ends else len(text) - self._doubtful(text)
        # Behind a stop string nothing is told any more: the answer has ended.
        self._held = text[cut:]
        self._told += cut
        return text[:cut]

    def _doubtful(self, text: str) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return max(
            (
                length
                for stop in self._stops
                for length in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:length])
            ),
            default=0,
        )
