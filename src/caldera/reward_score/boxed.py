r"""The answer in the last `\boxed{...}` of a solution."""

from __future__ import annotations

import re

__all__ = ["last_boxed"]

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
