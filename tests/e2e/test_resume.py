"""A run that is killed, wherever that happens, goes on as if nothing had been."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

if TYPE_CHECKING:
    from tests.conftest import Lab

STEPS = 10
STEPS_PER_EPOCH = 5
SAMPLES_PER_STEP = 5 * 4
VALIDATION_SAMPLES = 25
PATIENCE = 240.0  # seconds for a process to reach the place where it is killed

# Runs import this module, and stand still at the place that is to see them killed. The second
# process of the same command finds the mark of the first, and goes on.
STANDSTILL = '''
import time
from pathlib import Path

import torch

calls = {"score": 0, "tensor": 0}


def stand_still(place, number, at, mark):
    calls[place] += 1
    if calls[place] == number and at == place and not Path(mark).exists():
        Path(mark).touch()
        time.sleep(600)


def compute_score(data_source, solution_str, ground_truth, extra_info, number, at, mark):
    stand_still("score", number, at, mark)
    return float(solution_str == ground_truth)


def pausing_save(*args, **kwargs):
    """Writes a tensor; stands still after the third of those that are to lie in a folder."""
    save(*args, **kwargs)
    settings = Path(__file__).with_name("pause.txt")
    if settings.exists():
        folder, mark = settings.read_text().split()
        if Path(folder).exists():
            stand_still("tensor", 3, "tensor", mark)


save = torch.save
torch.save = pausing_save
AdamW = torch.optim.AdamW  # by which the run comes to import this module
'''


class Run:
    """One run's folder, and the command that starts and resumes it."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        folder.mkdir()
        (folder / "standstill.py").write_text(STANDSTILL)
        self.folder = folder
        self.directory = folder / "run"
        self.mark = folder / "mark"
        search_path = f"{lab.environment['PYTHONPATH']}:{folder}"
        self._lab = lab
        self._environment = lab.environment | {"PYTHONPATH": search_path}

    def arguments(self, *more: str, stop_at_score: int = 0) -> list[str]:
        """PPO with everything that has a state: critic, adaptive KL, schedule, shuffled data."""
        return self._lab.overrides(
            self.directory,
            "algorithm.adv_estimator=gae",
            "algorithm.use_kl_in_reward=True",
            "algorithm.kl_ctrl.type=adaptive",
            "algorithm.kl_ctrl.horizon=100",
            "data.train_batch_size=5",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
            "actor_rollout_ref.actor.optim.optimizer_impl=standstill",
            "actor_rollout_ref.actor.optim.optimizer=AdamW",
            f"custom_reward_function.path={self.folder / 'standstill.py'}",
            f"custom_reward_function.reward_kwargs.number={stop_at_score}",
            "custom_reward_function.reward_kwargs.at=score",
            f"custom_reward_function.reward_kwargs.mark={self.mark}",
            f"trainer.total_epochs={STEPS // STEPS_PER_EPOCH}",
            f"trainer.test_freq={STEPS_PER_EPOCH}",
            f"trainer.save_freq={STEPS_PER_EPOCH}",
            *more,
        )

    def finish(self, arguments: list[str]) -> None:
        status, output = self.ended(arguments)
        assert status == 0, output

    def ended(self, arguments: list[str]) -> tuple[int, str]:
        """Exit status and output."""
        with self._start(arguments) as process:
            output, _ = process.communicate()
        return process.returncode, output

    def kill_at_mark(self, arguments: list[str]) -> None:
        """Start, and send SIGKILL once the process stands still."""
        with self._start(arguments) as process:
            deadline = time.monotonic() + PATIENCE
            while not self.mark.exists() and process.poll() is None:
                assert time.monotonic() < deadline, "the run did not get to its mark"
                time.sleep(0.02)
            process.kill()
            output, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, output

    def _start(self, arguments: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._lab.warm.command("caldera.trainer.main_ppo", *arguments), text=True,
            env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def tracked_step(self) -> int:
        return int((self.directory / "latest_checkpointed_iteration.txt").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        """Without what a clock measured."""
        return [
            {k: v for k, v in row.items() if not k.startswith(("timing_", "perf/"))}
            for row in self._lab.metrics(self.directory)
        ]


@pytest.fixture(scope="module")
def new_run(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Run]:
    return lambda: Run(lab, tmp_path_factory.mktemp("resume") / "work")


@pytest.fixture(scope="module")
def uninterrupted(new_run: Callable[[], Run]) -> Run:
    run = new_run()
    run.finish(run.arguments())
    assert [row["step"] for row in run.metrics()] == list(range(1, STEPS + 1))
    return run


def test_killed_in_the_middle_of_a_step(new_run: Callable[[], Run], uninterrupted: Run) -> None:
    run = new_run()
    arguments = run.arguments("trainer.save_freq=3", stop_at_score=4 * SAMPLES_PER_STEP + 7)
    run.kill_at_mark(arguments)
    assert run.tracked_step() == 3
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4]  # the fourth is done again
    run.finish(arguments)
    _assert_same_end(run, uninterrupted)


def test_killed_after_an_epoch(new_run: Callable[[], Run], uninterrupted: Run) -> None:
    run = new_run()
    in_step_six = STEPS_PER_EPOCH * SAMPLES_PER_STEP + VALIDATION_SAMPLES + 1
    arguments = run.arguments(stop_at_score=in_step_six)
    run.kill_at_mark(arguments)
    assert run.tracked_step() == STEPS_PER_EPOCH
    run.finish(arguments)
    _assert_same_end(run, uninterrupted)


def test_killed_while_a_checkpoint_is_written(
    new_run: Callable[[], Run], uninterrupted: Run
) -> None:
    run = new_run()
    partial = run.directory / ".partial_global_step_6"
    (run.folder / "pause.txt").write_text(f"{partial / 'critic/dist_ckpt'} {run.mark}")
    arguments = run.arguments("trainer.save_freq=3")
    run.kill_at_mark(arguments)
    assert (partial / "actor/dist_ckpt/.metadata").is_file()
    assert not (partial / "critic/dist_ckpt/.metadata").exists()  # it is written last
    assert not (run.directory / "global_step_6").exists()
    assert run.tracked_step() == 3
    run.finish(arguments)
    assert not partial.exists()
    _assert_same_end(run, uninterrupted)


def test_killed_in_a_validation(new_run: Callable[[], Run], uninterrupted: Run) -> None:
    run = new_run()
    in_validation = STEPS_PER_EPOCH * SAMPLES_PER_STEP + 1
    arguments = run.arguments("trainer.save_freq=1", stop_at_score=in_validation)
    run.kill_at_mark(arguments)
    run.finish(arguments)
    _assert_same_end(run, uninterrupted)


def test_a_finished_run_trains_no_further(new_run: Callable[[], Run], uninterrupted: Run) -> None:
    run = _copy(uninterrupted, new_run())
    before = _files(run.directory)
    run.finish(run.arguments())
    assert _files(run.directory) == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            "trainer.total_training_steps=10",
            "Nothing is left to train: the checkpoint is of",
        ),
        ("trainer.total_training_steps=7", "is of step 10, but the run ends at step 7"),
        ("data.train_batch_size=10", "data.train_batch_size was 5 when it was saved and is 10 now"),
    ],
)
def test_a_run_that_would_train_nothing_says_so(
    new_run: Callable[[], Run], uninterrupted: Run, change: str, told: str
) -> None:
    run = _copy(uninterrupted, new_run())
    status, output = run.ended(run.arguments(change))
    assert told in output
    assert status == (0 if "Nothing" in told else 2), output
    assert run.metrics() == uninterrupted.metrics()


def test_a_finished_run_trains_on_when_it_gets_another_epoch(
    new_run: Callable[[], Run], uninterrupted: Run
) -> None:
    run = _copy(uninterrupted, new_run())
    (run.directory / "latest_checkpointed_iteration.txt").unlink()  # which is not needed
    run.finish(run.arguments("trainer.total_epochs=3"))
    steps = STEPS + STEPS_PER_EPOCH
    assert [row["step"] for row in run.metrics()] == list(range(1, steps + 1))
    assert run.metrics()[:STEPS] == uninterrupted.metrics()
    assert run.tracked_step() == steps


@pytest.mark.parametrize(("rows", "last"), [(20, 8), (15, 6)])
def test_a_run_goes_on_with_fewer_rows(
    new_run: Callable[[], Run], uninterrupted: Run, rows: int, last: int
) -> None:
    run = new_run()
    earlier = uninterrupted.directory / f"global_step_{STEPS_PER_EPOCH}"
    arguments = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={earlier}"]
    status, output = run.ended(run.arguments(*arguments, f"data.train_max_samples={rows}"))
    assert status == 0, output
    told = f"training rows was 25 when the checkpoint was saved and is {rows} now"
    assert told in " ".join(output.split())
    assert [row["step"] for row in run.metrics()] == list(range(STEPS_PER_EPOCH + 1, last + 1))


def test_a_byte_flipped_in_the_weights(new_run: Callable[[], Run], uninterrupted: Run) -> None:
    run = _copy(uninterrupted, new_run())
    weights = run.directory / f"global_step_{STEPS}/actor/dist_ckpt/__0_0.distcp"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    status, output = run.ended(run.arguments())
    assert status == 2 and f"{weights} has another checksum" in output, output
    earlier = run.directory / f"global_step_{STEPS_PER_EPOCH}"
    assert f"trainer.resume_from_path={earlier}" in output
    run.finish(run.arguments("trainer.resume_fallback=True"))
    _assert_same_end(run, uninterrupted)


def test_an_earlier_checkpoint_can_be_gone_on_from(
    new_run: Callable[[], Run], uninterrupted: Run
) -> None:
    run = new_run()
    earlier = uninterrupted.directory / f"global_step_{STEPS_PER_EPOCH}"
    run.finish(
        run.arguments("trainer.resume_mode=resume_path", f"trainer.resume_from_path={earlier}")
    )
    assert run.metrics() == uninterrupted.metrics()[STEPS_PER_EPOCH:]
    _assert_same_checkpoint(run, uninterrupted, with_rng=True)


def test_resuming_can_be_disabled(new_run: Callable[[], Run], uninterrupted: Run) -> None:
    run = _copy(uninterrupted, new_run())
    run.finish(run.arguments("trainer.resume_mode=disable", "trainer.total_training_steps=2"))
    # The schedule knows the shorter run's length, so the second step's learning rate differs.
    first, second = run.metrics()
    assert first == uninterrupted.metrics()[0]
    assert second["step"] == run.tracked_step() == 2


def test_a_run_that_starts_anew_keeps_its_own_checkpoint(
    new_run: Callable[[], Run], uninterrupted: Run
) -> None:
    run = _copy(uninterrupted, new_run())
    keep_one = ("trainer.max_actor_ckpt_to_keep=1", "trainer.max_critic_ckpt_to_keep=1")
    run.finish(
        run.arguments("trainer.resume_mode=disable", "trainer.total_training_steps=2", *keep_one)
    )
    assert run.tracked_step() == 2
    assert (run.directory / "global_step_2/actor").is_dir()


def _copy(source: Run, target: Run) -> Run:
    shutil.copytree(source.directory, target.directory)
    return target


def _files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file but the config, which names the folder; those of checkpoints untouched."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns if path.suffix == ".pt" else 0,
            path.read_bytes(),
        )
        for path in folder.rglob("*")
        if path.is_file() and path.name != "config.yaml"
    }


def _assert_same_end(run: Run, uninterrupted: Run) -> None:
    assert run.metrics() == uninterrupted.metrics()
    _assert_same_checkpoint(run, uninterrupted)


def _assert_same_checkpoint(run: Run, uninterrupted: Run, with_rng: bool = False) -> None:
    """Bit for bit: weights, optimisers, schedules, data order, KL controller.

    The global generators, which nothing here draws from, are the same only where both runs go
    back to one process: each process that starts from nothing seeds them anew.
    """
    assert run.tracked_step() == uninterrupted.tracked_step() == STEPS
    ours, theirs = (r.directory / f"global_step_{STEPS}" for r in (run, uninterrupted))
    names = {str(path.relative_to(theirs)) for path in theirs.rglob("*.pt")}
    assert {str(path.relative_to(ours)) for path in ours.rglob("*.pt")} == names
    assert len(names) == 3
    for role in ("actor", "critic"):
        one, other = (_state(folder / role / "dist_ckpt") for folder in (ours, theirs))
        assert {name.partition(".")[0] for name in one} == {"model", "optimizer"}
        assert _same(one, other), role
    for name in names:
        one, other = (torch.load(folder / name, weights_only=False) for folder in (ours, theirs))
        for extra in (one, other) if "extra_state" in name and not with_rng else ():
            del extra["rng"]
        assert _same(one, other), name
    states = [json.loads((f / "trainer_state.json").read_text()) for f in (ours, theirs)]
    assert states[0] == states[1]


def _state(folder: Path) -> Any:
    """All that a distributed checkpoint holds."""
    with tempfile.TemporaryDirectory() as place:
        dcp_to_torch_save(folder, Path(place) / "whole.pt")
        return torch.load(Path(place) / "whole.pt", weights_only=False)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
