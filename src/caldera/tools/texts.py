"""Texts of others, for models to read."""

from __future__ import annotations

__all__ = ["encodable"]


def encodable(text: str) -> str:
    """The text with `?` for what no tokenizer takes: half of a surrogate pair, as JSON may hold."""
    return text.encode(errors="replace").decode()
