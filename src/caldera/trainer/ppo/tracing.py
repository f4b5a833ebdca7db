"""Traces of sampled trajectories (`actor_rollout_ref.rollout.trace`), written by the workers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from caldera.agent_loop.output import COLUMN, DETAIL, GENERATE, TOOL, TrajectoryFacts
from caldera.config import PPOTrainerConfig
from caldera.protocol import DataProto
from caldera.reward import OUTCOMES, ROWS
from caldera.rollout import Completion
from caldera.tracking.traces import (
    GENERATION,
    TOKENS,
    Span,
    Trace,
    TracedRun,
    TraceWriter,
    check_tracer,
)
from caldera.workers.hooks import MakeHook

ROW_FACTS = ("uid", "data_source", "agent_name", "index")
"""Columns of a row that its trace can be found by."""


def make_tracer(config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase) -> MakeHook | None:
    """What makes the tracer in a worker's process, or None if nothing is traced."""
    backend = config.actor_rollout_ref.rollout.trace.backend
    check_tracer(backend)
    return None if backend is None else partial(RolloutTracer, config, tokenizer)


class RolloutTracer:
    """Traces the first `max_samples_per_step_per_worker` rows of each step and each validation."""

    def __init__(
        self, config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase, rank: int
    ) -> None:
        trace, trainer = config.actor_rollout_ref.rollout.trace, config.trainer
        assert trace.backend is not None
        self._tokenizer = tokenizer
        run = TracedRun(
            trace.project_name or trainer.project_name,
            trace.experiment_name or trainer.experiment_name,
            rank,
        )
        decode = self._decode if trace.token2text else None
        self.writer = TraceWriter(trace.backend, run, decode)
        self._most = trace.max_samples_per_step_per_worker
        self._place: tuple[int, bool] | None = None
        self._taken = 0

    def begin(self, prompts: DataProto) -> BatchTracing:
        meta = prompts.meta_info
        place = (int(meta.get("global_steps", 0)), bool(meta.get("validate", False)))
        if place != self._place:
            self._place, self._taken = place, 0
        left = len(prompts) if self._most is None else self._most - self._taken
        count = min(left, len(prompts))
        self._taken += count
        return BatchTracing(self.writer, prompts, count, place)

    def finish(self) -> None:
        self.writer.finish()

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))


class BatchTracing:
    """The traces of the first `count` rows of a batch, which is being sampled."""

    def __init__(
        self,
        writer: TraceWriter,
        prompts: DataProto,
        count: int,
        place: tuple[int, bool],
    ) -> None:
        self._writer = writer
        self._prompts = prompts
        self._count = count
        self._step, self._validate = place
        self._begun = time.time()
        self._ended: dict[int, tuple[float, Completion]] = {}

    def on_finished(self, place: int, completion: Completion) -> None:
        """Note when a response ended."""
        if place < self._count:
            self._ended[place] = time.time() - self._begun, completion

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Traces are written by `join`, when rewards are known."""

    def join(self, responses: DataProto) -> DataProto:
        """Hand the traces to the thread that writes them; the batch stays as it is."""
        facts = responses.non_tensor_batch.get(COLUMN)
        outcomes = responses.non_tensor_batch.get(OUTCOMES)
        traces = []
        for row in range(self._count):
            if facts is None:
                spans, rewards = [self._response_span(row)], {}
            else:
                spans, rewards = self._agent_spans(facts[row]), _own_rewards(facts[row])
            if outcomes is not None and outcomes[row] is not None and "reward" not in rewards:
                rewards["reward"] = outcomes[row].score
            traces.append(self._trace(row, spans, rewards))
        self._writer.write(traces)
        for fact in () if facts is None else facts:  # the controller has no use for them
            for event in fact.timeline:
                event.pop(DETAIL, None)
        return responses

    def _trace(self, row: int, spans: list[Span], outputs: dict[str, Any]) -> Trace:
        columns: Mapping[str, Any] = self._prompts.non_tensor_batch[ROWS][row]
        facts = {key: columns[key] for key in ROW_FACTS if columns.get(key) is not None}
        facts["validate"] = self._validate
        facts["sample_seed"] = int(self._prompts.non_tensor_batch["sample_seed"][row])
        messages = columns.get("raw_prompt")
        inputs = {} if messages is None else {"messages": [dict(m) for m in messages]}
        start = min((span.start for span in spans), default=self._begun)
        end = max((span.start + span.seconds for span in spans), default=start)
        name = str(columns.get("agent_name") or "trajectory")
        return Trace(name, self._step, start, end - start, inputs, outputs, facts, spans)

    def _response_span(self, row: int) -> Span:
        """The one generation of a row that no agent loop runs."""
        seconds, sampled = self._ended[row]
        tensors = self._prompts.batch
        assert tensors is not None
        ids = tensors["input_ids"][row][tensors["attention_mask"][row].bool()].tolist()
        outputs = _sampled(sampled.token_ids, sampled.log_probs, sampled.weight_version)
        return Span("generate", GENERATION, self._begun, seconds, {TOKENS: ids}, outputs)

    def _agent_spans(self, facts: TrajectoryFacts) -> list[Span]:
        return [span for event in facts.timeline for span in self._event_spans(event)]

    def _event_spans(self, event: Mapping[str, Any]) -> list[Span]:
        start, seconds = self._begun + event["start"], event["seconds"]
        detail = event.get(DETAIL, {})
        if event["kind"] == GENERATE and detail:
            outputs = _sampled(detail[TOKENS], detail["log_probs"], detail["weight_version"])
            inputs = {TOKENS: detail["prompt_ids"]}
            return [Span(GENERATE, GENERATION, start, seconds, inputs, outputs)]
        if event["kind"] == TOOL and "calls" in event:
            arguments = detail.get("arguments", [])
            return [
                Span(
                    str(call["name"]),
                    "tool",
                    start,
                    call.get("seconds", seconds),
                    {"arguments": arguments[place]} if place < len(arguments) else {},
                    dict(call),
                )
                for place, call in enumerate(event["calls"])
            ]
        told = {key: value for key, value in event.items() if key != DETAIL}
        return [Span(str(event["kind"]), str(event["kind"]), start, seconds, outputs=told)]


def _own_rewards(facts: TrajectoryFacts) -> dict[str, Any]:
    """What the trajectory itself knows of its rewards."""
    rewards: dict[str, Any] = {}
    if facts.reward_score is not None:
        rewards["reward"] = facts.reward_score
    if facts.turn_rewards:
        rewards["turn_rewards"] = [reward for _, reward in facts.turn_rewards]
    return rewards


def _sampled(token_ids: list[int], log_probs: list[float], version: int) -> dict[str, Any]:
    summary: dict[str, Any] = {TOKENS: token_ids, "weight_version": version}
    if log_probs:
        summary["log_prob_mean"] = sum(log_probs) / len(log_probs)
        summary["log_prob_min"] = min(log_probs)
    return summary
