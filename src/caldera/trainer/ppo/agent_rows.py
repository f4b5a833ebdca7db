"""What the controller does with the trajectories of agent loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from caldera.agent_loop.black_box import black_box_metrics
from caldera.agent_loop.output import COLUMN, TrajectoryFacts
from caldera.data import object_array
from caldera.protocol import DataProto, tensors_of
from caldera.search_agent.metrics import search_metrics

__all__ = ["DUMPED", "agent_metrics", "facts_in", "with_agent_columns"]

Metrics = dict[str, float]
SECONDS = ("generate_sequences", "tool_calls", "compute_score")
DUMPED = ("__num_turns__", "turn_scores", "tool_rewards", "tool_calls", "timeline")
"""Columns of agents that are written beside the answers."""


def facts_in(batch: DataProto) -> list[TrajectoryFacts]:
    """What is known of each row's trajectory; empty without agent loops."""
    column = batch.non_tensor_batch.get(COLUMN)
    return [] if column is None else list(column)


def with_agent_columns(answers: DataProto) -> DataProto:
    """The answers, with a column of each thing that agent loops tell of their trajectories.

    Loops differ in what they tell: a row has None where its loop tells nothing.
    """
    facts = facts_in(answers)
    if not facts:
        return answers
    told = [
        {**fact.columns(), "tool_calls": fact.tool_calls, "timeline": fact.timeline}
        for fact in facts
    ]
    names = dict.fromkeys(name for row in told for name in row)
    for name in names:
        answers.non_tensor_batch[name] = object_array([row.get(name) for row in told])
    turns = answers.non_tensor_batch["__num_turns__"]
    answers.non_tensor_batch["__num_turns__"] = turns.astype(np.int32)
    return answers


def agent_metrics(batch: DataProto) -> Metrics:
    """Tool calls by name and outcome, seconds by kind, and the slowest trajectory."""
    facts = facts_in(batch)
    if not facts:
        return {}
    calls = [sum(fact.tool_calls.values()) for fact in facts]
    metrics = _spread("tool_call_counts", calls)
    total: Counter[str] = Counter()
    for fact in facts:
        total.update(fact.tool_calls)
    metrics |= {f"tool_calls/{name}": float(count) for name, count in sorted(total.items())}
    for name in SECONDS:
        seconds = [fact.metrics[name] for fact in facts]
        if name != "compute_score" or any(seconds):
            metrics |= _spread(f"timing_s/agent_loop/{name}", seconds)
    preempted = [fact.metrics["num_preempted"] for fact in facts]
    if min(preempted) >= 0:
        metrics |= _spread("timing_s/agent_loop/num_preempted", preempted)
    tensors = tensors_of(batch)
    metrics |= search_metrics(
        [fact.extra_fields for fact in facts], tensors["response_mask"], tensors["attention_mask"]
    )
    metrics |= black_box_metrics([fact.extra_fields for fact in facts])
    return metrics | _slowest(batch, facts)


def _slowest(batch: DataProto, facts: Sequence[TrajectoryFacts]) -> Metrics:
    """Of the trajectory that took longest."""
    took = [fact.metrics["generate_sequences"] + fact.metrics["tool_calls"] for fact in facts]
    row = int(np.argmax(took))
    tensors = tensors_of(batch)
    mask, width = tensors["attention_mask"][row], tensors["prompts"].shape[-1]  # (P + R,)
    prefix = "timing_s/agent_loop/slowest"
    return {
        f"{prefix}/generate_sequences": facts[row].metrics["generate_sequences"],
        f"{prefix}/tool_calls": facts[row].metrics["tool_calls"],
        f"{prefix}/prompt_length": float(mask[:width].sum()),
        f"{prefix}/response_length": float(mask[width:].sum()),
    }


def _spread(name: str, values: Sequence[float]) -> Metrics:
    return {
        f"{name}/min": float(min(values)),
        f"{name}/max": float(max(values)),
        f"{name}/mean": float(np.mean(values)),
    }
