"""Code problems: the program in the answer passes the problem's tests.

Programs run in a sandbox, which is not this package's: the caller passes its `run_tests`.
"""

from __future__ import annotations

import re
from typing import Any

from caldera.errors import RewardError
from caldera.reward_score.code_tests import CodeTest, RunTests, build_tests
from caldera.reward_score.routing import register_scorer

__all__ = ["compute_score", "extract_code"]

TESTS_FOR_CREDIT = 10  # a problem may have hundreds
FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*$", re.MULTILINE)
PYTHON = ("python", "python3", "py", "")


@register_scorer("codecontests", "apps", "codeforces", "taco", "humaneval", "mbpp")
def compute_score(
    solution_str: str,
    ground_truth: Any,
    run_tests: RunTests | None = None,
    continuous: bool = True,
) -> dict[str, Any]:
    """1 if all tests pass; else the share of the first ten that do, or 0 unless `continuous`.

    The share can be 1 where a later test fails; `acc` is 1 only if all pass.
    """
    if run_tests is None:
        raise RewardError(
            "code problems need a sandbox to run programs in: score them with "
            "default_compute_score(..., run_tests=...)"
        )
    tests = build_tests(extract_code(solution_str), ground_truth)
    passed = until_failure(tests, run_tests)
    solved = all(passed)
    if solved or not continuous:
        return {"score": float(solved), "acc": float(solved)}
    passed = passed[:TESTS_FOR_CREDIT]
    for test in tests[len(passed) : TESTS_FOR_CREDIT]:
        passed += until_failure([test], run_tests)
    return {"score": sum(passed) / len(passed), "acc": 0.0}


def until_failure(tests: list[CodeTest], run_tests: RunTests) -> list[bool]:
    """Verdicts on the tests, up to the first that fails."""
    verdicts: list[bool] = []
    results = run_tests([test.program for test in tests])
    for test, result in zip(tests, results, strict=True):
        verdicts.append(test.passed(result))
        if not verdicts[-1]:
            break
    return verdicts


def extract_code(solution: str) -> str:
    """The last fenced block of Python, up to the end if it is not closed; all if there is none."""
    blocks: list[str] = []
    opening: re.Match[str] | None = None
    for fence in FENCE.finditer(solution):
        if opening is None:
            opening = fence
            continue
        if opening[1].lower() in PYTHON:
            blocks.append(solution[opening.end() : fence.start()])
        opening = None
    if opening is not None and opening[1].lower() in PYTHON:
        blocks.append(solution[opening.end() :])
    return blocks[-1].strip("\n") if blocks else solution
