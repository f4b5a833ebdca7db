"""Strings that end a completion."""

from __future__ import annotations

from collections.abc import Sequence

from caldera.rollout.base import Decode

TOKENS_A_CHARACTER = 4
"""At most, of a tokenizer that falls back to the bytes of UTF-8."""


def window_of(stops: Sequence[str]) -> int:
    """How many of the last tokens can have a part in one of these strings."""
    return TOKENS_A_CHARACTER * (max(map(len, stops)) + 1)


def completes_a_stop(token_ids: Sequence[int], stops: Sequence[str], decode: Decode) -> bool:
    """Whether one of these strings is in the text of the last tokens.

    To be asked after each token, so that the newest one has completed it.
    """
    text = decode(token_ids[-window_of(stops) :])
    return any(stop in text for stop in stops)
