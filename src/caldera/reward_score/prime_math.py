r"""Competition mathematics: the answer in the last `\boxed` equals the ground truth as mathematics.

`1/2` is `0.5`, and `x + 1` is `1 + x`. Needs the extra `math`.
"""

from __future__ import annotations

from typing import Any

from caldera.reward_score import symbolic
from caldera.reward_score.hendrycks_math import last_boxed, same_answer
from caldera.reward_score.routing import register_scorer

__all__ = ["compute_score"]


@register_scorer(
    "numina_aops_forum",
    "numina_synthetic_math",
    "numina_amc_aime",
    "numina_synthetic_amc",
    "numina_cn_k12",
    "numina_olympiads",
)
def compute_score(
    solution_str: str, ground_truth: Any, cpu_seconds: float = symbolic.CPU_SECONDS
) -> float:
    """1 for an answer that equals the ground truth; 0 for another, for none, and for one that
    takes more than `cpu_seconds` of processor time to compare."""
    symbolic.require_math_verify()  # here, or its lack would show with the first wrong answer
    answer = last_boxed(solution_str)
    reference = last_boxed(str(ground_truth)) or str(ground_truth)
    if answer is None:
        return 0.0
    return float(same_answer(answer, reference) or symbolic.equal(answer, reference, cpu_seconds))
