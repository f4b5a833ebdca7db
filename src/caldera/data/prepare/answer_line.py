"""The prompt of problems that are answered on a last line `Answer: ...`."""

from __future__ import annotations

TEMPLATE = """Work through the math problem below step by step. End your response with a line of \
the form Answer: $Answer, where $Answer is your final answer to the problem.

{problem}

Keep in mind that the last line has to start with "Answer:" and give the final answer."""


def answer_line_prompt(problem: str) -> str:
    return TEMPLATE.format(problem=problem)
