"""What search agents did in a batch, under Search-R1's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from caldera.search_agent.generation import SearchTrajectory

__all__ = ["facts_of", "search_metrics"]

ACTIONS, VALID, SEARCHES, FINISHED = (
    "search_actions", "search_valid_actions", "search_valid_searches", "search_finished",
)  # fmt: skip


def facts_of(trajectory: SearchTrajectory) -> dict[str, Any]:
    """The columns of a trajectory from which its metrics follow."""
    return {
        ACTIONS: trajectory.actions,
        VALID: trajectory.valid_actions,
        SEARCHES: trajectory.valid_searches,
        FINISHED: trajectory.finished,
    }


def search_metrics(
    facts: Sequence[Mapping[str, Any]], response_mask: Tensor, attention_mask: Tensor
) -> dict[str, float]:
    """The metrics of a batch, of which `facts` are the columns; none without a search agent.

    `response_mask` is 1 for tokens of the policy's own (B, R); `attention_mask` covers the prompts
    as well (B, P + R).
    """
    ours = [each for each in facts if ACTIONS in each]
    if not ours:
        return {}
    actions = [int(each[ACTIONS]) for each in ours]
    valid = sum(int(each[VALID]) for each in ours)
    in_loss = float(response_mask.sum())
    tokens = float(attention_mask[:, -response_mask.shape[1] :].sum())
    return {
        "env/number_of_actions/mean": sum(actions) / len(ours),
        "env/number_of_actions/max": float(max(actions)),
        "env/number_of_actions/min": float(min(actions)),
        "env/finish_ratio": sum(bool(each[FINISHED]) for each in ours) / len(ours),
        "env/number_of_valid_action": valid / len(ours),
        "env/ratio_of_valid_action": valid / max(1, sum(actions)),
        "env/number_of_valid_search": sum(int(each[SEARCHES]) for each in ours) / len(ours),
        "state_tokens/total": in_loss,
        "state_tokens/coverage": in_loss / max(1.0, tokens),
    }
