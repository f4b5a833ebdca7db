"""GSM8K: the answer is the number after `####`."""

from __future__ import annotations

import re
from typing import Any

from caldera.errors import ConfigError
from caldera.reward_score.routing import register_scorer

__all__ = ["compute_score", "extract_answer"]

SEARCHED_CHARACTERS = 300  # the answer stands at the end, and long responses are slow to search
STRICT_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
NUMBER = re.compile(r"-?[0-9.,]+")


@register_scorer("openai/gsm8k")
def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right answer, `format_score` for a wrong one, 0 if there is none at all.

    Answers are compared as text, without thousands separators: 2.50 is not 2.5.
    """
    answer = extract_answer(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == without_separators(str(ground_truth)) else format_score


def extract_answer(solution_str: str, method: str = "strict") -> str | None:
    """The last answer in a solution: after `####` (strict), or the last number (flexible)."""
    end = solution_str[-SEARCHED_CHARACTERS:]
    if method == "strict":
        answers = [without_separators(answer) for answer in STRICT_ANSWER.findall(end)]
    elif method == "flexible":
        # A full stop after a number ends the sentence; it is no part of the number.
        answers = [without_separators(number).rstrip(".") for number in NUMBER.findall(end)]
        answers = [answer for answer in answers if answer.strip("-")]
    else:
        raise ConfigError(f"method={method!r} of the gsm8k scorer must be strict or flexible")
    return answers[-1] if answers else None


def without_separators(number: str) -> str:
    return number.replace(",", "").replace("$", "")
