"""The search scorer that also rewards the form of a response and what its searches found."""

from __future__ import annotations

import re
from typing import Any

from caldera.reward_score.qa_em import last_answer, matches, targets_of

TAG = re.compile(r"<(/?)(think|search|information|answer)>")
# What may come after an element; a response begins with a thought and ends with its answer.
FOLLOWERS = {
    None: ("think",),
    "think": ("search", "answer"),
    "search": ("information",),
    "information": ("think",),
    "answer": (),
}


def compute_score(
    solution_str: str,
    ground_truth: Any,
    structure_format_score: float = 0.2,
    final_format_score: float = 0.1,
    retrieval_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """A score by answer and form.

    | | right answer | wrong answer |
    |---|---|---|
    | right form | score | structure_format_score, and retrieval_score if a search found a target |
    | wrong form | score - structure_format_score | final_format_score |

    A response without an answer has the wrong form, and earns 0.
    """
    targets = targets_of(ground_truth)
    answer = last_answer(solution_str)
    if answer is None:
        return 0.0
    right = matches(answer, targets)
    if not has_form(solution_str):
        return score - structure_format_score if right else final_format_score
    if right:
        return score
    found = any(matches(text, targets, anywhere=True) for text in found_texts(solution_str))
    return structure_format_score + (retrieval_score if found else 0.0)


def has_form(solution: str) -> bool:
    """Whether a response is thoughts, searches with what they found, and one answer, in order.

    The elements are `<think>`, `<search>`, `<information>` and `<answer>`, with nothing but space
    between them.
    """
    previous: str | None = None  # the last element that was closed
    opened: str | None = None
    end = 0  # of the last tag
    for tag in TAG.finditer(solution):
        closes, name = tag[1] == "/", tag[2]
        if closes:
            if name != opened:
                return False
            previous, opened = opened, None
        else:
            outside = solution[end : tag.start()].strip()
            if opened is not None or outside or name not in FOLLOWERS[previous]:
                return False
            opened = name
        end = tag.end()
    return previous == "answer" and opened is None and not solution[end:].strip()


def found_texts(solution: str) -> list[str]:
    """What the searches of a well-formed response found."""
    parts = solution.split("<information>")[1:]
    return [part.partition("</information>")[0] for part in parts]
