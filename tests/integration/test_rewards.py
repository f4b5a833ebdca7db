"""Runs whose scorer fails or hangs go on; scoring while sampling changes no number."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from caldera.config import load_config
from caldera.data.importing import load_object
from caldera.errors import RewardError
from caldera.trainer.ppo.setup import run

if TYPE_CHECKING:
    from tests.conftest import Lab

SCORER = """
import os, signal, threading
HANG = threading.Event()

def fails(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str.startswith("3"):
        raise ValueError("three")
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

def breaks(data_source, solution_str, ground_truth, extra_info=None):
    raise OSError("the judge is away")

CALLS = []
def leaves(data_source, solution_str, ground_truth, extra_info=None):
    CALLS.append(solution_str)
    if len(CALLS) > 400:  # of the first step
        raise OSError("the judge is away")
    return float(solution_str == ground_truth)

def says_yes(data_source, solution_str, ground_truth, extra_info=None):
    return "yes"

def hangs(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["index"] == 0:
        HANG.wait()
    return float(solution_str == ground_truth)
"""
MEASURED = ("timing", "perf/")
"""Metrics that differ from run to run."""

Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def scorer(tmp_path: Path) -> str:
    (tmp_path / "scorer.py").write_text(SCORER)
    return str(tmp_path / "scorer.py")


@pytest.fixture
def train(lab: Lab, tmp_path: Path, scorer: str) -> Train:
    """Runs in this process; returns the metrics of each step but for those of time and memory."""

    def make(name: str, function: str, *more: str) -> list[dict[str, Any]]:
        overrides = lab.overrides(
            tmp_path / name,
            f"custom_reward_function.path={scorer}",
            f"custom_reward_function.name={function}",
            f"trainer.rollout_data_dir={tmp_path / name / 'dump'}",
            "trainer.total_training_steps=2",
            "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
            *more,
        )
        run(load_config(overrides))
        rows = lab.metrics(tmp_path / name)
        return [
            {key: value for key, value in row.items() if not key.startswith(MEASURED)}
            for row in rows
        ]

    return make


def dumped(folder: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"dump/{step}.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "actor/huggingface/model.safetensors")


@pytest.mark.parametrize("estimator", ["grpo", "remax"])
def test_streaming_changes_no_number(train: Train, tmp_path: Path, estimator: str) -> None:
    options = (
        f"algorithm.adv_estimator={estimator}", "trainer.save_freq=2", "trainer.test_freq=2",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    )  # fmt: skip
    streamed = train("streamed", "fails", *options)
    after = train("after", "fails", *options, "reward.streaming=False")
    assert streamed == after
    assert streamed[0]["reward/failed"] > 0
    assert streamed[0]["reward/failure_rate"] == streamed[0]["reward/failed"] / (25 * 16)
    assert streamed[1]["val-aux/caldera/arithmetic/reward_failed/count"] > 0
    for step in (1, 2):
        assert dumped(tmp_path / "streamed", step) == dumped(tmp_path / "after", step)
    ours, theirs = (weights(tmp_path / name / "global_step_2") for name in ("streamed", "after"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_failures_are_told_and_a_run_goes_on_where_it_was(train: Train, tmp_path: Path) -> None:
    whole = train("whole", "fails")
    train("resumed", "fails", "trainer.save_freq=1", "trainer.total_training_steps=1")
    resumed = train("resumed", "fails", "trainer.save_freq=1")
    same = {key: resumed[-1][key] for key in whole[-1]}
    assert same == whole[-1]
    rows = dumped(tmp_path / "whole", 1)
    failed = [row for row in rows if row["output"].startswith("3")]
    assert 0 < len(failed) < len(rows)
    assert all(row["reward_state"] == "failed" and row["score"] == 0 for row in failed)
    assert all("ValueError: three" in row["reward_error"] for row in failed)
    others = [row for row in rows if row not in failed]
    assert all(row["reward_state"] == "value" and row["reward_error"] is None for row in others)
    mean = sum(row["score"] for row in others) / len(others)
    assert whole[0]["critic/score/mean"] == pytest.approx(mean)


def test_failures_that_are_scored_0(train: Train, tmp_path: Path) -> None:
    (first, _) = train("zero", "fails", "reward.on_failure=zero")
    rows = dumped(tmp_path / "zero", 1)
    assert first["critic/score/mean"] == pytest.approx(sum(row["score"] for row in rows) / 400)
    assert first["reward/failed"] > 0


def test_a_scorer_that_goes_away_stops_nothing_and_teaches_nothing(
    train: Train, tmp_path: Path
) -> None:
    rows = train(
        "broken", "leaves", "trainer.save_freq=1", "algorithm.adv_estimator=gae",
        "trainer.test_freq=2",
    )  # fmt: skip
    assert [row["reward/failure_rate"] for row in rows] == [0.0, 1.0]
    assert "actor/pg_loss" in rows[0] and "actor/pg_loss" not in rows[1]
    ours, theirs = (weights(tmp_path / f"broken/global_step_{step}") for step in (1, 2))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


BREAKS_AT = SCORER[: SCORER.index("the judge is away")].count("\n") + 1


@pytest.mark.parametrize(
    ("function", "first"),
    [
        ("breaks", f"the score function raised OSError: the judge is away (scorer.py:{BREAKS_AT})"),
        ("says_yes", "the score must be a finite number, and is 'yes'"),
    ],
)
@pytest.mark.parametrize("validate", [False, True])
def test_a_scorer_that_never_works_ends_the_run(
    train: Train, tmp_path: Path, scorer: str, function: str, first: str, validate: bool
) -> None:
    folder = tmp_path / "never"
    kept = f"trainer.validation_data_dir={folder / 'dump'}"
    with pytest.raises(RewardError) as caught:
        train("never", function, f"trainer.val_before_train={validate}", kept)
    rows = dumped(folder, 0 if validate else 1)
    assert {row["reward_error"] for row in rows} == {first}
    assert str(caught.value) == (
        f"none of the first {len(rows)} responses could be scored, so that the run would learn "
        f"nothing. The first: {first}\n  score function: {function} of {scorer}"
    )
    assert not list(folder.glob("global_step_*"))


def test_a_scorer_that_hangs_stops_nothing(train: Train, scorer: str) -> None:
    try:
        rows = train(
            "hung", "hangs", "reward.timeout=5", "reward.num_workers=16",
            "trainer.total_training_steps=1",
        )  # fmt: skip
    finally:
        load_object(scorer, "HANG", "custom_reward_function").set()
    assert rows[0]["reward/timed_out"] == 16.0  # the answers to one prompt
    assert rows[0]["actor/grad_norm"] > 0


def test_a_response_is_scored_while_another_is_sampled(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler stops after the first answer until somebody has scored one."""
    from caldera.reward import default
    from caldera.reward_score import default_compute_score
    from caldera.rollout import NativeRollout

    scored = threading.Event()
    seen: list[bool] = []
    generate, score = NativeRollout.generate, default_compute_score

    def stops(self: Any, requests: Any, on_finished: Any = None) -> Any:
        def tell(place: int, completion: Any) -> None:
            on_finished(place, completion)
            if not seen:
                seen.append(scored.wait(60))

        return generate(self, requests, tell)

    def tells(*args: Any, **kwargs: Any) -> Any:
        scored.set()
        return score(*args, **kwargs)

    monkeypatch.setattr(NativeRollout, "generate", stops)
    monkeypatch.setattr(default, "default_compute_score", tells)
    run(load_config(lab.overrides(tmp_path, "trainer.total_training_steps=1")))
    assert seen == [True]


@pytest.mark.slow
def test_processes_that_score_on_two_ranks(
    lab: Lab, train: Train, tmp_path: Path, scorer: str
) -> None:
    """Each rank samples and scores its rows."""
    alone = train("alone", "fails", "trainer.total_training_steps=1")
    both = lab.train(
        tmp_path / "both", "trainer.total_training_steps=1", "trainer.n_gpus_per_node=2",
        f"custom_reward_function.path={scorer}", "custom_reward_function.name=fails",
        "reward_model.reward_manager=prime", "reward.num_workers=1",
    )  # fmt: skip
    lab.assert_same(both, alone)
    assert both[0]["reward/failed"] == alone[0]["reward/failed"] > 0
