"""Questions answered by searching: the text in the last `<answer>` is one of the targets."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from typing import Any

from caldera.errors import ConfigError, DataError
from caldera.reward_score.routing import register_scorer

__all__ = ["compute_score", "last_answer", "matches", "normalise", "targets_of"]

OPENING, CLOSING = "<answer>", "</answer>"
MOST_TAGS = 10  # of either kind: more is an attempt to hit by many guesses
ARTICLE = re.compile(r"\b(?:a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@register_scorer(
    "searchR1_nq",
    "searchR1_triviaqa",
    "searchR1_popqa",
    "searchR1_hotpotqa",
    "searchR1_2wikimultihopqa",
    "searchR1_musique",
    "searchR1_bamboogle",
)
def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "em",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right answer, `format_score` for a wrong one, 0 if there is none.

    `method` is em (the answer is a target, but for case, punctuation and articles) or sub_em (a
    target occurs in it). With more than ten answer tags, the right answer earns a quarter.
    """
    if method not in ("em", "sub_em"):
        raise ConfigError(f"method={method!r} of the search scorer must be em or sub_em")
    targets = targets_of(ground_truth)
    answer = last_answer(solution_str)
    if answer is None:
        return 0.0
    if not matches(answer, targets, anywhere=method == "sub_em"):
        return format_score
    tags = max(solution_str.count(OPENING), solution_str.count(CLOSING))
    return score / 4 if tags > MOST_TAGS else score


def last_answer(solution: str) -> str | None:
    start = solution.rfind(OPENING, 0, max(solution.rfind(CLOSING), 0))
    if start < 0:
        return None
    start += len(OPENING)
    return solution[start : solution.index(CLOSING, start)].strip()


def targets_of(ground_truth: Any) -> list[str]:
    """The right answers, any of which will do."""
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else None
    if isinstance(target, str):
        return [target]
    if not isinstance(target, Iterable) or not (targets := [str(each) for each in target]):
        raise DataError(
            "the ground truth of a search question must be {'target': answer or list of answers}, "
            f"got {ground_truth!r}"
        )
    return targets


def matches(text: str, targets: list[str], anywhere: bool = False) -> bool:
    """Whether a text is one of the targets or, with `anywhere`, holds one."""
    text = normalise(text)
    # A target of nothing but punctuation would occur everywhere.
    wanted = [target for target in map(normalise, targets) if target]
    return any(target in text if anywhere else target == text for target in wanted)


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, with single spaces."""
    text = text.lower().translate(WITHOUT_PUNCTUATION)
    words = ARTICLE.sub(" ", text).split() or text.split()  # the letter A is an answer too
    return " ".join(words)
