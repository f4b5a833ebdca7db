"""HumanEval: functions to complete, each with a `check` that tests them."""

from __future__ import annotations

import ast

from caldera.data.files import Row
from caldera.data.prepare.code_problem import assert_tests, code_prompt
from caldera.data.prepare.preparer import HubTable, Source, register_preparer, rl_row, text_of


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
    """What the prompt defines beside the function to complete, and the imports for it.

    The tests bring it along: were it the answer's, an answer could redefine what judges it.
    """
    top = ast.parse(start).body
    others = [node for node in top if getattr(node, "name", function) != function]
    if not others:
        return ""
    imports = [node for node in top if isinstance(node, ast.Import | ast.ImportFrom)]
    parts = [ast.get_source_segment(start, node) or "" for node in (*imports, *others)]
    return "\n\n".join([*parts, ""])
