"""The tags by which a policy searches and answers, and what it is told."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from caldera.tools.retrieval import Document

__all__ = ["STOPS", "Action", "documents_text", "invalid_text", "observation", "read_action"]

STOPS = ("</search>", "</answer>")
"""A turn ends with one of these."""
TAGS = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class Action:
    """What the policy does in a turn."""

    kind: Literal["search", "answer"]
    content: str


def read_action(text: str) -> Action | None:
    """The first action of a turn; None if there is none, or nothing stands in its tags."""
    match = TAGS.search(text)
    if match is None or not match[2].strip():
        return None
    return Action("search" if match[1] == "search" else "answer", match[2].strip())


def documents_text(documents: Sequence[Document]) -> str:
    """The passages that were found."""
    if not documents:
        return "No search results found."
    return "".join(
        f"Doc {number}(Title: {document.title}) {document.text}\n"
        for number, document in enumerate(documents, start=1)
    )


def observation(text: str, start_marker: str, end_marker: str) -> str:
    """What a search has brought, as the policy reads it."""
    return f"\n\n{start_marker}{text}{end_marker}\n\n"


def invalid_text() -> str:
    """What the policy reads after a turn without an action."""
    return (
        "\nThat was no valid action. To search, write a query between <search> and </search>. "
        "To answer, write the answer between <answer> and </answer>. Try again.\n"
    )
