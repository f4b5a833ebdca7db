"""APPS: programs that read standard input, or functions that are called."""

from __future__ import annotations

import json
from typing import Any

from caldera.data.files import Row
from caldera.data.prepare.code_problem import call_tests, code_prompt
from caldera.data.prepare.preparer import HubTable, Source, register_preparer, rl_row, text_of

HUB = "codeparrot/apps"


@register_preparer(
    "apps",
    Source("train", "train", HubTable(HUB, "all", "train"), "apps"),
    Source("test", "test", HubTable(HUB, "all", "test"), "apps"),
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
