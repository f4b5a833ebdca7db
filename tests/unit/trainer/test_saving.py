"""Saves that are complete at once, and those that workers write while the next step runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from caldera.config import TrainerConfig
from caldera.errors import CheckpointError, RewardError, WorkerError
from caldera.trainer.checkpoint import TRACKER, CheckpointFolder


class Writer:
    """A group of two ranks that write when the test says so."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.written = [True, True]
        self.is_dead = False
        self.waited = 0

    def save_checkpoint(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.written = [False, False]

    def write(self, rank: int) -> None:
        assert self.folder is not None
        (self.folder / f"rank_{rank}.pt").write_text("weights")
        self.written[rank] = True

    def checkpoint_written(self) -> list[bool]:
        self._check()
        return list(self.written)

    def wait_for_checkpoint(self) -> list[None]:
        self._check()
        self.waited += 1
        for rank in (0, 1):
            self.write(rank)
        return [None, None]

    def _check(self) -> None:
        if self.is_dead:
            raise WorkerError("worker group actor was ended after a failure")


class Run:
    def __init__(self, folder: Path) -> None:
        self.checkpoints = CheckpointFolder(TrainerConfig(default_local_dir=str(folder)))
        self.actor, self.critic = Writer(), Writer()
        writers: Any = [self.actor, self.critic]
        self.checkpoints.writers += writers
        self.saves = self.checkpoints

    def save(self, step: int) -> None:
        self.saves.save(step, self._write)

    def _write(self, folder: Path) -> None:
        self.actor.save_checkpoint(folder / "actor")
        self.critic.save_checkpoint(folder / "critic")
        (folder / "data.pt").write_text("position")

    def newest(self) -> str | None:
        """What another process would go on from."""
        config = TrainerConfig(default_local_dir=str(self.checkpoints.root))
        found = CheckpointFolder(config).to_resume()
        return None if found is None else found.name


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_a_save_counts_once_every_rank_of_every_role_has_written(run: Run) -> None:
    run.save(3)
    for group, rank in ((run.actor, 0), (run.actor, 1), (run.critic, 1)):
        run.saves.poll()
        assert run.newest() is None
        group.write(rank)
    run.saves.poll()
    assert run.newest() is None and not run.checkpoints.has_saved
    run.critic.write(0)
    run.saves.poll()
    assert run.newest() == "global_step_3" and run.checkpoints.has_saved
    folder = run.checkpoints.root / "global_step_3"
    assert sorted(path.name for path in folder.rglob("*.pt")) == sorted(
        ["data.pt", *["rank_0.pt", "rank_1.pt"] * 2]
    )
    run.saves.poll()  # there is nothing in flight
    assert run.actor.waited == 1


def test_the_next_save_waits_for_the_last(run: Run) -> None:
    run.save(3)
    run.save(4)
    assert run.newest() == "global_step_3"
    assert (run.actor.waited, run.critic.waited) == (1, 1)
    assert sorted(path.name for path in run.checkpoints.root.iterdir()) == [
        ".partial_global_step_4",
        "global_step_3",
        TRACKER,
    ]


def test_the_end_of_a_run_waits(run: Run) -> None:
    with run.saves:
        run.save(3)
    assert run.newest() == "global_step_3"


def test_a_run_that_is_killed_goes_on_from_the_last_complete_one(run: Run) -> None:
    run.save(3)
    run.save(4)
    after = Run(run.checkpoints.root)
    assert after.newest() == "global_step_3"
    with after.saves:
        after.save(4)
    assert after.newest() == "global_step_4"
    assert not (after.checkpoints.root / ".partial_global_step_4").exists()


def test_a_failure_elsewhere_ends_the_run_with_its_save_complete(run: Run) -> None:
    with pytest.raises(RewardError, match="a scorer"), run.saves:
        run.save(3)
        raise RewardError("a scorer raised")
    assert run.newest() == "global_step_3"


def test_the_failure_that_ends_a_run_is_told(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(WorkerError, match="rank 1 died"), run.saves:
        run.save(3)
        run.actor.is_dead = True
        raise WorkerError("rank 1 died")
    assert run.newest() is None
    assert caplog.messages == [
        "the checkpoint of step 3 was not completed: worker group actor was ended after a failure"
    ]


def test_a_write_that_fails_ends_the_run(run: Run) -> None:
    with pytest.raises(WorkerError, match="was ended after a failure"), run.saves:
        run.save(3)
        run.critic.is_dead = True
        run.saves.poll()
        for rank in (0, 1):
            run.actor.write(rank)
        run.saves.poll()
    assert run.newest() is None


def test_an_interrupt_is_not_kept_waiting(run: Run) -> None:
    with pytest.raises(KeyboardInterrupt), run.saves:
        run.save(3)
        raise KeyboardInterrupt
    assert run.actor.waited == 0
    assert run.newest() is None


def test_without_background_writers_a_save_is_complete_when_it_returns(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    saves = run.checkpoints
    saves.writers.clear()
    with saves:
        for step in (3, 4):
            saves.save(step, lambda folder: (folder / "actor").mkdir())
            assert run.newest() == f"global_step_{step}"
            saves.poll()


def test_a_write_that_has_failed_is_no_checkpoint(run: Run) -> None:
    """Not even when the run, on its way out, tries to complete what it can."""

    def fail_once() -> list[None]:
        run.actor.wait_for_checkpoint = type(run.actor).wait_for_checkpoint.__get__(run.actor)  # type: ignore[method-assign]
        raise CheckpointError("the disk is full")

    with pytest.raises(CheckpointError, match="full"), run.saves:
        run.save(3)
        for rank in (0, 1):
            run.actor.write(rank)
            run.critic.write(rank)
        run.actor.wait_for_checkpoint = fail_once  # type: ignore[method-assign]
        run.saves.poll()
    assert run.newest() is None
