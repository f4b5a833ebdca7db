r"""MATH: the answer stands in the last `\boxed`, compared as Hendrycks et al. (2021) compare."""

from __future__ import annotations

import re
from typing import Any

from caldera.reward_score.routing import register_scorer

__all__ = ["compute_score", "last_boxed", "same_answer", "without_name"]


BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text, and opens or closes nothing
UNBRACED = re.compile(r"[ \t]+([^\s$]+)")


def last_boxed(solution: str) -> str | None:
    r"""What the last `\boxed{...}` or `\fbox{...}` holds, or `5` of `\boxed 5$`.

    None if there is no box or the last one is not closed, as in a response that was cut off.
    """
    boxes = list(BOX.finditer(solution))
    if not boxes:
        return None
    start = boxes[-1].end()
    if not solution.startswith("{", start):
        unbraced = UNBRACED.match(solution, start)
        return unbraced[1] if unbraced else None
    depth = 0
    for brace in BRACE.finditer(solution, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return solution[start + 1 : brace.start()]
    return None


# A unit follows its number after a space and ends the answer: `5\text{ cm}^2`. Text in the middle,
# as in `2\text{ or }3`, is no unit: without it, half of the answer would do.
UNIT = re.compile(r"\\text\{ [^{}]*\}(?:\^\{?[23]\}?)?\.?\s*$")
LONGEST_NAME = 2  # of a variable, as in `x = 5`
REWRITES = [
    (re.compile(r"\n|\\!"), ""),
    (re.compile(r"\\\\"), r"\\"),  # a line break, such as matrices have
    (re.compile(r"\\[td]frac"), r"\\frac"),
    (re.compile(r"\\(?:left|right)(?![a-zA-Z])"), ""),
    (re.compile(r"\^(?:\{\\circ\}|\\circ)|\\?%|\\\$"), ""),
    (re.compile(r"(^|[ {])\."), r"\g<1>0."),
    (re.compile(r"\\sqrt ?([^\s{\[])"), r"\\sqrt{\1}"),
    (re.compile(r" "), ""),
    (re.compile(r"\\frac([0-9a-zA-Z])([0-9a-zA-Z])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac([0-9a-zA-Z])\{"), r"\\frac{\1}{"),
    (re.compile(r"\\frac(\{[^{}]*\})([0-9a-zA-Z])"), r"\\frac\1{\2}"),
    (re.compile(r"^0\.5$"), r"\\frac{1}{2}"),
    (re.compile(r"^(-?[0-9]+)/(-?[0-9]+)$"), r"\\frac{\1}{\2}"),
]


@register_scorer("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
def compute_score(solution_str: str, ground_truth: Any) -> float:
    r"""1 if the last `\boxed` holds the ground truth, but for ways of writing it; else 0."""
    answer = last_boxed(solution_str)
    return float(answer is not None and same_answer(answer, str(ground_truth)))


def same_answer(answer: str, reference: str) -> bool:
    """Whether two answers are the same text once both are written in one way."""
    return normalise(answer) == normalise(reference)


def normalise(answer: str) -> str:
    number = UNIT.sub("", answer)
    answer = without_name(number if number.strip() else answer).strip()
    for pattern, replacement in REWRITES:
        answer = pattern.sub(replacement, answer)
    return answer


def without_name(answer: str) -> str:
    """`5` of `x = 5`."""
    name, equals, value = answer.partition("=")
    named = equals and "=" not in value and len(name.strip()) <= LONGEST_NAME
    return value if named else answer
