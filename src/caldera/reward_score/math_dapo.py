"""DAPO's mathematics: the answer on the last `Answer:` line, written in one way, scores 1 or -1."""

from __future__ import annotations

import re
from typing import Any

from caldera.reward_score.hendrycks_math import last_boxed, without_name
from caldera.reward_score.routing import register_scorer

__all__ = ["compute_score", "normalise"]

SEARCHED_CHARACTERS = 300  # the answer stands at the end
SEARCHED_FOR_BOX = 100
NO_ANSWER = "[INVALID]"  # what `pred` says then
ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

WORDS = (  # that may stand beside a number without changing it
    "cents? children cm days? degrees? digits? dollars? edges feet foot ft gm hours? inch inches "
    "integers km liters? mph meals? meters? miles? minutes? multiples ounces? points? pounds? "
    "seconds? square students? tickets? units? ways? weeks? yards? years?"
)
BESIDE_NUMBER = re.compile(rf"(?<=[\d\s{{~])(?<!\\)(?:{'|'.join(WORDS.split())})(?![a-zA-Z])")
LEADING_ARTICLE = re.compile(r"^(?:an?|the)\s+")
# In this order: what is left of a unit, an empty `\text{}`, is taken away after the unit.
REWRITES = [
    (re.compile(r"\\[td]frac"), r"\\frac"),
    (re.compile(r"\\(?:left|right)(?![a-zA-Z])"), ""),
    (re.compile(r"\\mbox"), r"\\text"),
    (re.compile(r",?\s*\\text\{\s*and\s*\}"), ","),
    (re.compile(r"\^(?:\{\\circ\}|\\circ)|\\[$%!,;: ]|\\(?:dots|quad)(?![a-zA-Z])|[%$~]"), ""),
    (BESIDE_NUMBER, ""),
    (re.compile(r"\\text\{\s*[mg]?\s*\}(?:\^[23])?"), ""),
    (re.compile(r"\\(?:text|textbf|overline|mathrm|boxed)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\sqrt ?([^\s{\[])"), r"\\sqrt{\1}"),
    (re.compile(r"\\frac ?([0-9a-zA-Z]) ?([0-9a-zA-Z])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\s"), ""),
    (re.compile(r"\.+$"), ""),
]
THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")


@register_scorer("math_dapo", "math", "math_dapo_reasoning", "aime*")
def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False
) -> dict[str, Any]:
    r"""1 for the right answer, -1 for any other or none.

    With `strict_box_verify`, the answer is what the last `\boxed` holds, letter for letter.
    """
    reference = str(ground_truth)
    if strict_box_verify:
        answer = last_boxed(solution_str[-SEARCHED_FOR_BOX:])
        right = answer == reference.strip()
    else:
        reference = without_name(reference)
        answer = answer_on_line(solution_str, is_equation="=" in reference)
        right = answer == normalise(reference)
    return {
        "score": 1.0 if right else -1.0,
        "acc": float(right),
        "pred": NO_ANSWER if answer is None else answer,
    }


def answer_on_line(solution: str, is_equation: bool) -> str | None:
    """What the last `Answer:` line says; unless an equation is wanted, what it says after `=`."""
    lines = ANSWER_LINE.findall(solution[-SEARCHED_CHARACTERS:])
    if not lines:
        return None
    line = without_name(lines[-1])
    return normalise(line if is_equation else line.rpartition("=")[2])


def normalise(answer: str) -> str:
    """A final answer without what surrounds it, much as Lewkowycz et al. (2022) describe.

    Units, dollar signs, spaces and thousands separators go; text commands are opened and
    `\\frac12` gets its braces.
    """
    answer = LEADING_ARTICLE.sub("", answer.strip())
    for pattern, replacement in REWRITES:
        answer = pattern.sub(replacement, answer)
    return answer.replace(",", "") if THOUSANDS.fullmatch(answer) else answer
