"""What the data sets of programming problems share: the prompt, and tests as ground truth."""

from __future__ import annotations

import json
from typing import Any

INSTRUCTION = """Write Python code that solves the problem below. Give the whole program, with its \
imports and helper functions, in one block that starts with ```python and ends with ```.

{problem}"""


def code_prompt(problem: str) -> str:
    return INSTRUCTION.format(problem=problem.strip())


def assert_tests(cases: list[str]) -> str:
    """Pieces of code, each to run after the solution: a case that raises has failed."""
    return json.dumps({"assert_case": cases})


def call_tests(inputs: list[Any], outputs: list[Any], function: str | None) -> str:
    """Arguments and results of a function; without one, standard input and output."""
    tests: dict[str, Any] = {"inputs": inputs, "outputs": outputs}
    return json.dumps(tests | ({"fn_name": function} if function else {}))
