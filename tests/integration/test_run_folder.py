"""What a run leaves in its folder besides checkpoints: recordings, shown answers, its bundle."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING

from caldera.commands.repeat import command_of, differences
from caldera.trainer.bundle import read_bundle

if TYPE_CHECKING:
    from tests.conftest import Lab

ACTOR = "actor_rollout_ref.actor.profiler"


def test_recordings_answers_and_bundle(lab: Lab, tmp_path: Path) -> None:
    """Steps 2 and 3 are one recording; the validation after them is no part of it."""
    run = tmp_path / "run"
    more = (
        "trainer.total_training_steps=3", "trainer.test_freq=3",
        "trainer.log_val_generations=2", "actor_rollout_ref.rollout.val_kwargs.n=1",
        "global_profiler.tool=torch", "global_profiler.steps=[2,3]",
        "global_profiler.profile_continuous_steps=True",
        f"global_profiler.save_path={tmp_path}/profile",
        f"{ACTOR}.enable=True", f"{ACTOR}.ranks=[0]",
    )  # fmt: skip
    lab.train(run, *more)

    (trace,) = (tmp_path / "profile").rglob("*.*")
    assert trace.relative_to(tmp_path / "profile") == Path("step_2/actor_rank_0.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    marks = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert marks.count("update_actor") == marks.count("generate_sequences") == 2

    shown = (run / "metrics.generations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in shown] == [3, 3]

    bundle = read_bundle(run)
    # This process has other variables than the run had.
    assert [each for each in differences(bundle) if not each.startswith("variable ")] == []
    assert bundle["files"]["data.train_files"].keys() == {str(lab.train_file)}
    assert str(lab.model / "model.safetensors") in bundle["files"]["actor_rollout_ref.model.path"]
    assert bundle["seeds"]["actor_rollout_ref.rollout.seed"] == 42
    command = command_of(bundle, str(tmp_path / "again"))
    assert command[1:3] == ["-m", "caldera.trainer.main_ppo"]
    assert command[-1] == f"trainer.default_local_dir={tmp_path}/again"
