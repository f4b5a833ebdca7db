"""A supervised run that is killed, wherever that happens, goes on as if nothing had been."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

if TYPE_CHECKING:
    from tests.conftest import Lessons

STEPS = 8
PATIENCE = 240.0  # seconds for a process to reach the place where it is killed

# Runs import this module as their optimiser's, and stand still at the place that is to see them
# killed. The second process of the same command finds the mark of the first, and goes on.
STANDSTILL = """
import os
import time
from pathlib import Path

import torch

MARK, AT_STEP = Path(os.environ["MARK"]), int(os.environ["AT_STEP"])
save = torch.save


class AdamW(torch.optim.AdamW):
    steps = 0

    def step(self, *args, **kwargs):
        AdamW.steps += 1
        stand_still(AdamW.steps == AT_STEP)
        return super().step(*args, **kwargs)


def pausing_save(*args, **kwargs):
    save(*args, **kwargs)
    stand_still(AdamW.steps == -AT_STEP)


def stand_still(is_here):
    if is_here and not MARK.exists():
        MARK.touch()
        time.sleep(600)


torch.save = pausing_save
"""


class Run:
    """One run's folder, and the command that starts and resumes it."""

    def __init__(self, lessons: Lessons, folder: Path, at_step: int, *more: str) -> None:
        (folder / "standstill.py").write_text(STANDSTILL)
        self.directory, self.mark = folder / "run", folder / "mark"
        self._metrics = lessons.lab.metrics
        arguments = lessons.overrides(
            self.directory, "optim.optimizer_impl=standstill", "trainer.save_freq=3",
            "trainer.test_freq=4", *more,
        )  # fmt: skip
        self._command = lessons.lab.warm.command("caldera.cli", "sft", *arguments)
        search_path = f"{lessons.lab.environment['PYTHONPATH']}:{folder}"
        self._environment = lessons.lab.environment | {
            "PYTHONPATH": search_path, "MARK": str(self.mark), "AT_STEP": str(at_step),
        }  # fmt: skip

    def finish(self) -> None:
        with self._start() as process:
            output, _ = process.communicate()
        assert process.returncode == 0, output

    def kill_at_mark(self) -> None:
        with self._start() as process:
            deadline = time.monotonic() + PATIENCE
            while not self.mark.exists() and process.poll() is None:
                assert time.monotonic() < deadline, "the run did not get to its mark"
                time.sleep(0.02)
            process.kill()
            output, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, output

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command, env=self._environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def tracked_step(self) -> int:
        return int((self.directory / "latest_checkpointed_iteration.txt").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        """Without what a clock measured."""
        return [
            {k: v for k, v in row.items() if not k.startswith(("timing_", "perf/"))}
            for row in self._metrics(self.directory)
        ]

    def state(self) -> dict[str, Any]:
        """Weights and optimiser of the last step, the order of the data, and the schedule."""
        folder = self.directory / f"global_step_{STEPS}"
        extra = torch.load(folder / "actor/extra_state_world_size_1_rank_0.pt", weights_only=False)
        with tempfile.TemporaryDirectory() as place:
            dcp_to_torch_save(folder / "actor/dist_ckpt", Path(place) / "whole.pt")
            whole = torch.load(Path(place) / "whole.pt", weights_only=False)
        return {
            "weights": whole,
            "data": torch.load(folder / "data.pt"),
            "schedule": extra["lr_scheduler"],
        }


@pytest.fixture(scope="module")
def uninterrupted(lessons: Lessons, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(lessons, tmp_path_factory.mktemp("uninterrupted"), 0)
    run.finish()
    assert [row["step"] for row in run.metrics()] == list(range(1, STEPS + 1))
    return run


@pytest.mark.parametrize(
    ("at_step", "saved"), [(6, 3), (-6, 3)], ids=["in a step", "while a checkpoint is written"]
)
def test_killed(
    lessons: Lessons, uninterrupted: Run, tmp_path: Path, at_step: int, saved: int
) -> None:
    run = Run(lessons, tmp_path, at_step)
    run.kill_at_mark()
    assert run.tracked_step() == saved
    run.finish()
    assert run.tracked_step() == STEPS
    assert run.metrics() == uninterrupted.metrics()
    assert same(run.state(), uninterrupted.state())


def test_the_newest_checkpoints_are_kept(lessons: Lessons, tmp_path: Path) -> None:
    run = Run(lessons, tmp_path, 0, "trainer.max_ckpt_to_keep=2", "trainer.total_epochs=1",
              "trainer.save_freq=1")  # fmt: skip
    run.finish()
    found = sorted(path.name for path in run.directory.glob("global_step_*"))
    assert found == ["global_step_3", "global_step_4"]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
