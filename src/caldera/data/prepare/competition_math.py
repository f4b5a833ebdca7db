"""MATH: competition problems whose answer stands in the last box of the solution."""

from __future__ import annotations

import re

from caldera.data.files import Row
from caldera.data.prepare.preparer import HubTable, Source, register_preparer, rl_row, text_of
from caldera.errors import DataError

MATH = "DigitalLearningGmbH/MATH-lighteval"
MATH_500 = "HuggingFaceH4/MATH-500"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[^\s{$]+))")
BRACE = re.compile(r"(?<!\\)[{}]")


@register_preparer(
    "math",
    Source("train", "train", HubTable(MATH, "default", "train"), MATH),
    Source("test", "math500", HubTable(MATH_500, None, "test"), MATH_500),
    Source("test", "test", HubTable(MATH, "default", "test"), MATH),
)
def math_row(raw: Row, source: Source) -> Row | None:
    problem, answer = text_of(raw, "problem"), raw.get("answer")
    if answer == "" and not raw.get("solution"):
        return None
    return rl_row(
        source.data_source,
        f"{problem} {INSTRUCTION}",
        ability="math",
        ground_truth=str(answer) if answer else boxed_answer(text_of(raw, "solution")),
        question=problem,
        answer=raw.get("solution"),
        level=raw.get("level"),
        subject=raw.get("subject") or raw.get("type"),
    )


def boxed_answer(solution: str) -> str:
    """What stands in the last `\\boxed{...}` (or `\\fbox`) of a solution."""
    boxes = list(BOX.finditer(solution))
    if not boxes:
        raise DataError(f"no \\boxed{{}} in the solution {solution!r}")
    box = boxes[-1]
    if box["bare"]:
        return box["bare"]
    depth = 1
    for brace in BRACE.finditer(solution, box.end()):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return solution[box.end() : brace.start()]
    raise DataError(f"the last \\boxed{{}} is not closed in the solution {solution!r}")
