"""The built-in arithmetic task: the answer is a bare integer and nothing else."""

from __future__ import annotations

from typing import Any

from caldera.reward_score.routing import register_scorer


@register_scorer("caldera/arithmetic")
def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """1 if the solution is the ground truth, digit for digit, with at most space around it."""
    answer = solution_str.strip()
    correct = float(answer == str(ground_truth).strip())
    return {"score": correct, "acc": correct, "pred": answer}
