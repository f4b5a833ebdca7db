"""Programming problems: APPS, HumanEval and MBPP, with tests as ground truth."""

from __future__ import annotations

import ast
import json
from typing import Any

from caldera.data.files import Row
from caldera.data.prepare.preparer import HubTable, Source, register_preparer, rl_row, text_of
from caldera.errors import DataError

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


APPS = "codeparrot/apps"


@register_preparer(
    "apps",
    Source("train", "train", HubTable(APPS, "all", "train"), "apps"),
    Source("test", "test", HubTable(APPS, "all", "test"), "apps"),
)
def apps_row(raw: Row, source: Source) -> Row | None:
    tests = _tests(raw)
    if not tests.get("inputs"):
        return None
    function: str | None = tests.get("fn_name")
    problem = text_of(raw, "question").strip()
    if starter := (raw.get("starter_code") or "").strip():
        problem += f"\n\nStart from this code:\n\n```python\n{starter}\n```"
    if function:
        problem += f"\n\nThe function that is called has to be named {function}."
    else:
        problem += "\n\nThe program reads standard input and writes to standard output."
    return rl_row(
        source.data_source,
        code_prompt(problem),
        ability="code",
        ground_truth=call_tests(tests["inputs"], tests["outputs"], function),
        task_id=raw.get("problem_id", raw.get("id")),
        difficulty=raw.get("difficulty"),
    )


def _tests(raw: Row) -> dict[str, Any]:
    """Some problems have no tests, and some have numbers longer than Python reads: both are {}."""
    try:
        tests = json.loads(raw.get("input_output") or "{}")
    except ValueError:
        return {}
    return tests if isinstance(tests, dict) else {}


@register_preparer(
    "humaneval",
    Source("test", "HumanEval", HubTable("openai/openai_humaneval", None, "test"), "humaneval"),
)
def humaneval_row(raw: Row, source: Source) -> Row:
    start, function = text_of(raw, "prompt"), text_of(raw, "entry_point")
    tests = f"{text_of(raw, 'test').strip()}\n\ncheck({function})\n"
    problem = f"Complete this function, whose name stays {function}:\n\n```python\n{start}```"
    return rl_row(
        source.data_source,
        code_prompt(problem),
        ability="code",
        ground_truth=assert_tests([helpers_of(start, function) + tests]),
        task_id=raw.get("task_id"),
        answer=start + text_of(raw, "canonical_solution"),
    )


def helpers_of(start: str, function: str) -> str:
    """The definitions of the prompt beside the function to complete, and the imports for it.

    The tests bring it along: were it the response's, a response could redefine what judges it.
    """
    top = ast.parse(start).body
    others = [node for node in top if getattr(node, "name", function) != function]
    if not others:
        return ""
    imports = [node for node in top if isinstance(node, ast.Import | ast.ImportFrom)]
    parts = [ast.get_source_segment(start, node) or "" for node in (*imports, *others)]
    return "\n\n".join([*parts, ""])


# The authors' splits, by task_id; the first ten tasks are examples for prompts.
TASKS = {"train": range(601, 975), "validation": range(511, 601), "test": range(11, 511)}
MBPP = "google-research-datasets/mbpp"


@register_preparer(
    "mbpp", *(Source(split, "mbpp", HubTable(MBPP, "full", split), "mbpp") for split in TASKS)
)
def mbpp_row(raw: Row, source: Source) -> Row | None:
    if raw.get("task_id") not in TASKS[source.split]:
        return None
    tests = raw.get("test_list")
    if not isinstance(tests, list) or not tests:
        raise DataError(f"'test_list' must be a list of asserts, not {tests!r}")
    shown = "\n".join(tests)
    problem = f"{text_of(raw, 'text')}\n\nThese tests have to pass:\n\n```python\n{shown}\n```"
    setup = (raw.get("test_setup_code") or "").strip()
    return rl_row(
        source.data_source,
        code_prompt(problem),
        ability="code",
        ground_truth=assert_tests([f"{setup}\n{test}".strip() for test in tests]),
        task_id=raw["task_id"],
        answer=raw.get("code"),
    )
