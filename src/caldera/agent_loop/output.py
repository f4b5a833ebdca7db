"""From trajectories to a batch: padded tensors, and a column of what else is known of each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from caldera.agent_loop.base import AgentLoopOutput
from caldera.data import object_array
from caldera.data.loader import compute_position_ids, left_pad, right_pad
from caldera.errors import DataError, RolloutError
from caldera.protocol import DataProto

COLUMN = "agent_loop"
"""Column of the `TrajectoryFacts` of each row."""


@dataclass(frozen=True)
class TrajectoryFacts:
    """The facts of a trajectory beside its tokens."""

    num_turns: int
    metrics: dict[str, float]
    """Seconds, by what they were spent on."""
    reward_score: float | None = None
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    """(place in the response, reward)."""
    tool_calls: dict[str, int] = field(default_factory=dict)
    """How many, by `name/outcome`."""
    timeline: list[dict[str, Any]] = field(default_factory=list)
    extra_fields: dict[str, Any] = field(default_factory=dict)

    def columns(self) -> dict[str, Any]:
        """The columns for scorers and dumps."""
        return {**self.extra_fields, "__num_turns__": self.num_turns}


def fitted(output: AgentLoopOutput, prompt_length: int, response_length: int) -> AgentLoopOutput:
    """The part of a trajectory that a batch has room for, and that can be learned from.

    Tokens at its end that the policy has not sampled are left out: nothing follows from them, and
    a reward on the last of them would reach no token of the policy's.
    """
    if len(output.prompt_ids) > prompt_length:
        raise DataError(
            f"an agent loop made a prompt of {len(output.prompt_ids)} tokens, more than "
            f"data.max_prompt_length={prompt_length}"
        )
    end = min(len(output.response_mask), response_length)
    while end and not output.response_mask[end - 1]:
        end -= 1
    log_probs = output.response_logprobs
    output.response_ids = output.response_ids[:end]
    output.response_mask = output.response_mask[:end]
    output.response_logprobs = None if log_probs is None else log_probs[:end]
    output.turn_rewards = [(place, reward) for place, reward in output.turn_rewards if place < end]
    return output


def facts_of(output: AgentLoopOutput, timeline: list[dict[str, Any]]) -> TrajectoryFacts:
    """The values of the column."""
    return TrajectoryFacts(
        output.num_turns,
        asdict(output.metrics),
        output.reward_score,
        output.turn_rewards,
        output.tool_calls,
        timeline,
        output.extra_fields,
    )


def batch_of(
    outputs: Sequence[AgentLoopOutput],
    facts: Sequence[TrajectoryFacts],
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
    calculate_log_probs: bool,
) -> DataProto:
    """The batch of the trajectories: P tokens of prompt, left-padded, R of response."""
    masks = [output.response_mask for output in outputs]
    response_mask = right_pad(masks, response_length, 0)  # (B, R)
    prompts = left_pad([o.prompt_ids for o in outputs], prompt_length, pad_token_id)  # (B, P)
    responses = right_pad([o.response_ids for o in outputs], response_length, pad_token_id)
    there = [
        left_pad([[1] * len(o.prompt_ids) for o in outputs], prompt_length, 0),
        right_pad([[1] * len(o.response_ids) for o in outputs], response_length, 0),
    ]
    attention_mask = torch.cat(there, dim=1)  # (B, P + R)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": compute_position_ids(attention_mask),
        "response_mask": response_mask,
    }
    if calculate_log_probs:
        log_probs = [_log_probs(output) for output in outputs]
        tensors["rollout_log_probs"] = right_pad(log_probs, response_length, 0.0, torch.float32)
    return DataProto.from_dict(tensors=tensors, non_tensors={COLUMN: object_array(list(facts))})


def _log_probs(output: AgentLoopOutput) -> list[float]:
    if output.response_logprobs is None:
        raise RolloutError(
            "an agent loop gave no response_logprobs; set "
            "actor_rollout_ref.rollout.calculate_log_probs=false, or have it give them"
        )
    pairs = zip(output.response_logprobs, output.response_mask, strict=True)
    return [log_prob if mask else 0.0 for log_prob, mask in pairs]


# ---- What happened in a trajectory, and when

GENERATE, TOOL, USER, AGENT = "generate", "tool", "user", "agent"
"""Kinds of events: a turn is sampled, a tool is called, an interaction responds, an agent of which
nothing else is known runs."""
DETAIL = "detail"
"""Key of what traces alone show of an event, such as its tokens."""


class Timeline:
    """The events of one trajectory, in the order in which they ended."""

    def __init__(self, zero: float, is_detailed: bool = False) -> None:
        """`zero` is the moment, of `time.perf_counter`, from which seconds are counted.
        Callers add `DETAIL` to events that are to be detailed."""
        self._zero = zero
        self.is_detailed = is_detailed
        self.events: list[dict[str, Any]] = []

    @contextmanager
    def event(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Note how long the inside takes; it may add to the event."""
        begun = time.perf_counter()
        entry = {"kind": kind, "start": round(begun - self._zero, 4)} | fields
        try:
            yield entry
        finally:
            entry["seconds"] = round(time.perf_counter() - begun, 4)
            self.events.append(entry)

    def seconds(self, kind: str) -> float:
        """The sum over events of a kind."""
        return sum(float(event["seconds"]) for event in self.events if event["kind"] == kind)
