"""What a run says in the end, however that comes, and that it has its folder for itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Lab, Lessons

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs a POSIX system")

PATIENCE = 240.0  # seconds for a process to come to the place where it is stopped
# An optimiser that stands still in its third step, but for the process that finds `GO`.
STANDING = """
import os
import time
import torch

class AdamW(torch.optim.AdamW):
    steps = 0

    def step(self, *args, **kwargs):
        AdamW.steps += 1
        while AdamW.steps == 3 and not os.path.exists(os.environ["GO"]):
            time.sleep(0.02)
        return super().step(*args, **kwargs)
"""


@contextmanager
def started(
    lab: Lab, *arguments: str, launcher: Sequence[str] = (), **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """`caldera ARGUMENTS` in a session of its own, of which nothing is left in the end."""
    with subprocess.Popen(
        [sys.executable, *launcher, "-m", "caldera.cli", *arguments],
        env=lab.environment | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        # Whoever starts these tests in the background has it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            for pid in lab.processes_of(process.pid):
                os.kill(pid, signal.SIGKILL)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until the checkpoint of a step is there."""
    tracker, deadline = folder / "latest_checkpointed_iteration.txt", time.monotonic() + PATIENCE
    while not tracker.exists() or tracker.read_text() != str(step):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run did not come to its place"
        time.sleep(0.02)


def wait_for_steps(folder: Path, process: subprocess.Popen[str]) -> None:
    """Until there is a checkpoint of any step."""
    tracker, deadline = folder / "latest_checkpointed_iteration.txt", time.monotonic() + PATIENCE
    while not tracker.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run did not come to its place"
        time.sleep(0.02)


def press_ctrl_c(process: subprocess.Popen[str]) -> str:
    """As a terminal does, which tells all that is in the foreground; returns what was said."""
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, said
    return said


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_is_stopped_and_goes_on(lab: Lab, tmp_path: Path, ranks: int) -> None:
    run, go = tmp_path / "run", tmp_path / "go"
    arguments = lab.overrides(
        run, *lab.holding(go), "trainer.save_freq=1", "trainer.total_training_steps=3",
        f"trainer.n_gpus_per_node={ranks}",
    )  # fmt: skip
    with started(lab, "train", *arguments) as process:
        wait_for_step(run, 2, process)
        before = sorted(run.rglob("*"))
        other = lab.run(arguments)
        assert other.returncode == 2, other.stderr
        assert f"trainer.default_local_dir={str(run)!r}: another run is writing it" in other.stderr
        assert f"PID {process.pid} on " in other.stderr
        assert sorted(run.rglob("*")) == before

        said = press_ctrl_c(process)
        assert not lab.processes_of(process.pid)
    assert said == (
        f"caldera: stopped by Ctrl-C at step 3. The checkpoint of step 2 is in {run}: the same "
        "command goes on from there.\n"
    )

    go.touch()
    done = lab.run(arguments, COLUMNS="500")
    assert done.returncode == 0, done.stderr
    assert f"goes on from {run}/global_step_2" in done.stdout
    assert done.stdout.splitlines()[-3:] == [
        f"Run:        {run}",
        f"Checkpoint: {run}/global_step_3",
        f"Its page:   caldera report {run}",
    ]
    assert not (run / ".lock").exists()

    page = lab.run(["report", str(run)], "caldera.cli", COLUMNS="500")
    assert (page.returncode, page.stdout) == (0, f"Report: {run}/report.html\n")
    assert (run / "report.html").is_file()


def test_fine_tuning_is_stopped_and_goes_on(lessons: Lessons, tmp_path: Path) -> None:
    lab, run, go = lessons.lab, tmp_path / "run", tmp_path / "go"
    (tmp_path / "standing.py").write_text(STANDING)
    environment = {"PYTHONPATH": f"{lab.environment['PYTHONPATH']}:{tmp_path}", "GO": str(go)}
    arguments = lessons.overrides(
        run, "optim.optimizer_impl=standing", "trainer.total_training_steps=3",
        "trainer.save_freq=1", "trainer.resume_mode=disable",
    )  # fmt: skip
    with started(lab, "sft", *arguments, CALDERA_TRACEBACK="1", **environment) as process:
        wait_for_step(run, 2, process)
        other = lessons.run(["caldera.cli", "sft"], arguments, **environment)
        assert other.returncode == 2, other.stderr
        assert f"PID {process.pid} on " in other.stderr
        traceback, _, said = press_ctrl_c(process).partition("caldera: ")
    assert traceback.startswith("Traceback ")
    assert said == (
        f"stopped by Ctrl-C at step 3. The checkpoint of step 2 is in {run}: "
        "trainer.resume_mode=auto goes on from there.\n"
    )

    go.touch()
    arguments.append("trainer.resume_mode=auto")
    done = lessons.run(["caldera.cli", "sft"], arguments, COLUMNS="500", **environment)
    assert done.returncode == 0, done.stderr
    assert f"goes on from {run}/global_step_2" in done.stdout
    assert done.stdout.splitlines()[-2] == f"Checkpoint: {run}/global_step_3"


def test_ranks_of_torchrun_say_one_thing(lessons: Lessons, tmp_path: Path) -> None:
    run, torchrun = tmp_path / "run", ("-m", "torch.distributed.run", "--standalone")
    arguments = lessons.overrides(
        run, "trainer.total_training_steps=100000", "trainer.save_freq=1",
        "trainer.max_ckpt_to_keep=2",
    )  # fmt: skip
    launcher = (*torchrun, "--nproc_per_node=2")
    with started(lessons.lab, "sft", *arguments, launcher=launcher) as process:
        wait_for_steps(run, process)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    (told,) = [line for line in said.splitlines() if line.startswith("caldera: ")]
    assert told.startswith("caldera: stopped by Ctrl-C at step ")
    assert f" is in {run}: the same command goes on from there." in told
    # torchrun shows where it was itself, once; none of the ranks does.
    assert said.count("Traceback (most recent call last)") == said.count("SignalException: ") == 1
    assert "src/caldera" not in said


def test_a_command_without_steps_is_just_stopped(lab: Lab, tmp_path: Path) -> None:
    output = tmp_path / "demo"
    with started(lab, "demo", "--output", str(output)) as process:
        deadline = time.monotonic() + PATIENCE
        while not (output / "test.parquet").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "the demo did not come to its place"
            time.sleep(0.02)
        assert press_ctrl_c(process) == "caldera: stopped by Ctrl-C.\n"
