r"""Geometry3K: reasoning in `<think>`, then the answer in `\boxed`. Needs the extra `math`."""

from __future__ import annotations

from typing import Any

from caldera.reward_score import prime_math, symbolic
from caldera.reward_score.hendrycks_math import last_boxed
from caldera.reward_score.routing import register_scorer

__all__ = ["compute_score"]


@register_scorer("hiyouga/geometry3k")
def compute_score(
    solution_str: str,
    ground_truth: Any,
    format_score: float = 0.1,
    cpu_seconds: float = symbolic.CPU_SECONDS,
) -> float:
    """`format_score` for the right form, and the rest of 1 for the right answer."""
    accuracy = prime_math.compute_score(solution_str, ground_truth, cpu_seconds)
    return (1.0 - format_score) * accuracy + format_score * has_form(solution_str)


def has_form(solution: str) -> bool:
    r"""Whether a solution is `<think>...</think>` and then something with a `\boxed{...}`."""
    thought, end, rest = solution.strip().partition("</think>")
    return thought.startswith("<think>") and bool(end) and last_boxed(rest) is not None
