"""MBPP: short programming problems with three asserts each."""

from __future__ import annotations

from caldera.data.files import Row
from caldera.data.prepare.code_problem import assert_tests, code_prompt
from caldera.data.prepare.preparer import HubTable, Source, register_preparer, rl_row, text_of
from caldera.errors import DataError

# The authors' splits, by task_id; the first ten tasks are examples for prompts.
TASKS = {"train": range(601, 975), "validation": range(511, 601), "test": range(11, 511)}
HUB = "google-research-datasets/mbpp"


@register_preparer(
    "mbpp", *(Source(split, "mbpp", HubTable(HUB, "full", split), "mbpp") for split in TASKS)
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
