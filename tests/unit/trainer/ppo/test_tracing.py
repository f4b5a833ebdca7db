"""Traces of sampled answers and trajectories."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from caldera.agent_loop.output import COLUMN, DETAIL, GENERATE, TOOL, TrajectoryFacts
from caldera.config import PPOTrainerConfig
from caldera.data import object_array
from caldera.errors import ConfigError
from caldera.protocol import DataProto
from caldera.reward import OUTCOMES, ROWS
from caldera.reward.samples import Outcome
from caldera.rollout import Completion
from caldera.tracking.traces import TRACERS, Trace, TracedRun
from caldera.trainer.ppo.tracing import RolloutTracer, make_tracer


class Recording:
    """Keeps traces, and fails on request."""

    opened: ClassVar[list[Recording]] = []

    def __init__(self, run: TracedRun) -> None:
        self.run = run
        self.traces: list[Trace] = []
        Recording.opened.append(self)

    def write(self, trace: Trace) -> None:
        if self.run.project_name == "away":
            raise ConnectionError("server away")
        self.traces.append(trace)

    def finish(self) -> None: ...


class Letters:
    """A tokenizer, as far as traces need one."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(96 + token) for token in ids)


def tracer(monkeypatch: pytest.MonkeyPatch, **options: Any) -> RolloutTracer:
    monkeypatch.setattr(TRACERS, "_items", {"recording": Recording})
    monkeypatch.setattr(Recording, "opened", [])
    config = PPOTrainerConfig()
    config.trainer.project_name, config.trainer.experiment_name = "project", "experiment"
    trace = config.actor_rollout_ref.rollout.trace
    trace.backend = "recording"
    for name, value in options.items():
        setattr(trace, name, value)
    return RolloutTracer(config, Letters(), 3)  # type: ignore[arg-type]


def written(of: RolloutTracer) -> list[Trace]:
    of.finish()
    (backend,) = Recording.opened
    return backend.traces


def prompts(rows: int = 2, **meta: Any) -> DataProto:
    """Prompts of two tokens, left-padded to three."""
    columns = [{"uid": f"u{row}", "raw_prompt": [{"role": "user", "content": "?"}]}
               for row in range(rows)]  # fmt: skip
    return DataProto.from_dict(
        {"input_ids": torch.tensor([[0, 1, 2]] * rows),
         "attention_mask": torch.tensor([[0, 1, 1]] * rows)},
        {ROWS: object_array(columns), "sample_seed": np.array([7] * rows, dtype=object)},
        meta,
    )  # fmt: skip


def trace_answers(of: RolloutTracer, batch: DataProto) -> None:
    tracing = of.begin(batch)
    for row in range(len(batch)):
        tracing.on_finished(row, Completion([3, 4], [-1.0, -3.0], "stop", 5))
    outcomes = [Outcome(0.5), *[None] * (len(batch) - 1)]
    tracing.join(DataProto.from_dict(non_tensors={OUTCOMES: object_array(outcomes)}))


def test_a_single_answer_is_one_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    of = tracer(monkeypatch, token2text=True)
    trace_answers(of, prompts(global_steps=4))
    first, second = written(of)
    (span,) = first.spans
    assert span.inputs == {"token_ids": [1, 2], "text": "ab"}
    assert span.outputs == {
        "token_ids": [3, 4], "text": "cd", "weight_version": 5,
        "log_prob_mean": -2.0, "log_prob_min": -3.0,
    }  # fmt: skip
    assert first.step == 4 and first.seconds == pytest.approx(span.seconds, abs=1e-5)
    assert first.facts == {"uid": "u0", "validate": False, "sample_seed": 7}
    assert first.inputs == {"messages": [{"role": "user", "content": "?"}]}
    assert (first.outputs, second.outputs) == ({"reward": 0.5}, {})


def test_names_are_the_traces_own_or_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    of = tracer(monkeypatch, experiment_name="other")
    trace_answers(of, prompts())
    assert "text" not in written(of)[0].spans[0].inputs
    assert Recording.opened[0].run == TracedRun("project", "other", 3)


def test_a_step_has_so_many_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    of = tracer(monkeypatch, max_samples_per_step_per_worker=3)
    for meta in ({"global_steps": 1}, {"global_steps": 1}, {"global_steps": 1, "validate": True},
                 {"global_steps": 2}):  # fmt: skip
        trace_answers(of, prompts(**meta))
    found = [(trace.step, trace.facts["validate"]) for trace in written(of)]
    assert found == [(1, False)] * 3 + [(1, True)] * 2 + [(2, False)] * 2


def test_rows_beyond_the_limit_are_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    of = tracer(monkeypatch, max_samples_per_step_per_worker=0)
    with of.begin(prompts()) as tracing:
        for row in (1, 0):
            tracing.on_finished(row, Completion([3], [-1.0], "stop", 0))
    responses = DataProto()
    assert tracing.join(responses) is responses and written(of) == []


def test_a_trajectory_has_a_span_for_each_turn_and_call(monkeypatch: pytest.MonkeyPatch) -> None:
    detail = {"prompt_ids": [1, 2], "token_ids": [3], "log_probs": [-0.5], "weight_version": 2}
    calls = [{"name": "add", "status": "ok", "seconds": 0.25}, {"name": "", "status": "malformed"}]
    timeline = [
        {"kind": GENERATE, "start": 0.0, "seconds": 1.0, "turn": 0, "tokens": 1, DETAIL: detail},
        {"kind": TOOL, "start": 1.0, "seconds": 0.5, "calls": calls,
         DETAIL: {"arguments": ['{"a": 1}']}},
        {"kind": "user", "start": 1.5, "seconds": 0.5, "score": 1.0},
    ]  # fmt: skip
    facts = TrajectoryFacts(3, {}, turn_rewards=[(0, 0.25)], timeline=timeline)
    of = tracer(monkeypatch, max_samples_per_step_per_worker=1)
    answers = DataProto.from_dict(non_tensors={COLUMN: object_array([facts, facts])})
    of.begin(prompts()).join(answers)
    (trace,) = written(of)
    assert [(span.name, span.kind, span.seconds) for span in trace.spans] == [
        ("generate", "generation", 1.0), ("add", "tool", 0.25), ("", "tool", 0.5),
        ("user", "user", 0.5),
    ]  # fmt: skip
    assert trace.spans[0].inputs == {"token_ids": [1, 2]}
    assert trace.spans[0].outputs["weight_version"] == 2
    assert [span.inputs for span in trace.spans[1:3]] == [{"arguments": '{"a": 1}'}, {}]
    assert trace.spans[1].outputs["status"] == "ok" and trace.spans[3].outputs["score"] == 1.0
    assert trace.outputs == {"turn_rewards": [0.25]} and trace.seconds == pytest.approx(2.0)
    assert not any(DETAIL in event for event in timeline)


def test_a_back_end_that_fails_is_told_of_once_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of = tracer(monkeypatch, project_name="away")
    trace_answers(of, prompts(3))
    assert written(of) == [] and of.writer.losses.count == 3
    assert caplog.text.count("rollout.trace.backend: recording has failed") == 1
    assert "ConnectionError: server away" in caplog.text and "has lost 3 traces" in caplog.text


def test_a_missing_package_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = PPOTrainerConfig()
    assert make_tracer(config, Letters()) is None  # type: ignore[arg-type]
    config.actor_rollout_ref.rollout.trace.backend = "mlflow"
    monkeypatch.setattr("caldera.tracking.backends.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"trace\.backend='mlflow' needs .* pip install mlflow"):
        make_tracer(config, Letters())  # type: ignore[arg-type]
