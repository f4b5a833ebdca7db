"""Whole runs from the command line on a Ray cluster: the numbers of one process, and failures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Lab
    from tests.ray.conftest import RealNodes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
Rows = list[dict[str, Any]]
STEPS = 6
WAIT_S = 240.0
"""How long what is about to happen may take on a busy machine."""
TWO_RANKS = "trainer.n_gpus_per_node=2"
TWO_NODES = (
    "trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.save_freq=2",
    "actor_rollout_ref.nccl_timeout=60",
)  # fmt: skip


def on_ray(lab: Lab, address: str) -> Lab:
    return replace(lab, environment=lab.environment | {"RAY_ADDRESS": address})


@contextmanager
def running(
    lab: Lab, nodes: RealNodes, folder: Path, *more: str
) -> Iterator[subprocess.Popen[str]]:
    """A run over two nodes, whose end the test waits for."""
    arguments = lab.overrides(folder, *TWO_NODES, *lab.descent, *more)
    process = on_ray(lab, nodes.address).start(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def steps(number: int) -> str:
    return f"trainer.total_training_steps={number}"


def answers(folder: Path, step: int) -> str:
    """Every answer of a step, with its score."""
    return (folder / f"answers/{step}.jsonl").read_text()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until that step's checkpoint, or a later one, is complete."""
    latest = folder / "latest_checkpointed_iteration.txt"

    def is_there() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return latest.exists() and int(latest.read_text() or 0) >= step

    wait_for(is_there, f"no checkpoint of step {step}")


@pytest.fixture(scope="module")
def grpo(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rows]:
    """A run of one process without Ray: its folder, and the metrics of its steps."""
    folder = tmp_path_factory.mktemp("grpo")
    answers_to = f"trainer.rollout_data_dir={folder}/answers"
    rows = lab.train(folder, steps(STEPS), *lab.descent, answers_to)
    return folder, rows


# ---- the same numbers


def test_grpo_over_two_nodes(
    lab: Lab, nodes: RealNodes, grpo: tuple[Path, Rows], tmp_path: Path
) -> None:
    """The ranks are on different nodes; losses and rewards are those of local processes."""
    alone, expected = grpo
    local = lab.train(tmp_path / "local", steps(2), *lab.descent, TWO_RANKS)
    lab.assert_same(local, expected[:2])

    folder = tmp_path / "ray"
    more = ("trainer.logger=[console,file]", f"trainer.rollout_data_dir={folder}/answers")
    with running(lab, nodes, folder, steps(4), *more) as process:
        places: list[int] = []
        while places != [1, 1] and process.poll() is None:  # which they are until it ends
            places = [len(node.ranks()) for node in (nodes.head, *nodes.others)]
            time.sleep(0.05)
        output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, output
    assert places == [1, 1]
    lab.assert_same(lab.metrics(folder), expected[:4])
    for step in range(1, 5):  # rewards are not only close
        assert answers(folder, step) == answers(alone, step)
    assert "step:1 " in output  # the driver's console reaches the terminal
    wait_for(lambda: nodes.processes_of_runs() == {}, "orphans")


def test_ppo_with_all_roles(
    lab: Lab, cluster: Any, tmp_path: Path, all_roles: tuple[str, ...]
) -> None:
    """Critic, reference and reward model share the actor's processes; or the last has its own."""
    roles = (*all_roles, steps(2))
    expected = lab.train(tmp_path / "one", *roles)
    lab.assert_same(lab.train(tmp_path / "two", *roles, TWO_RANKS), expected)
    away = on_ray(lab, cluster.address)
    lab.assert_same(away.train(tmp_path / "ray", *roles, TWO_RANKS), expected)
    pool = ("reward_model.enable_resource_pool=True", "reward_model.nnodes=1")
    own_pool = (*pool, "reward_model.n_gpus_per_node=1")
    lab.assert_same(away.train(tmp_path / "pool", *roles, TWO_RANKS, *own_pool), expected)


# ---- more than there is


def test_more_than_the_cluster_has(lab: Lab, tmp_path: Path) -> None:
    """On a cluster of the run's own: it is refused at once, and Ray is stopped."""
    own = "+ray_kwargs.ray_init={address: local, num_cpus: 3, include_dashboard: false}"
    arguments = lab.overrides(
        tmp_path / "run", "trainer.worker_group=ray", own, "trainer.n_gpus_per_node=5"
    )
    with lab.start(arguments, start_new_session=True, stderr=subprocess.PIPE) as process:
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2, errors
    (error,) = (line for line in errors.splitlines() if line.startswith("caldera: error: "))
    assert "ask for 1 nodes of 5 processes (5 CPU each)" in error
    assert re.search(r"has room for 0 \([\d.]+: 3 CPU\)$", error)
    assert errors.endswith(f"{error}\n")
    assert not (tmp_path / "run").exists()
    wait_for(lambda: not lab.processes_of(process.pid), "Ray's processes")


# ---- failures


def screen_of(output: str) -> str:
    """The last screen about a failure, without what Ray puts before each line."""
    lines = [
        re.sub(r"^(\x1b\[\d+m)?\(caldera pid=\d+\)(\x1b\[0m)? ", "", line)
        for line in output.splitlines()
    ]
    end = max(i for i, line in enumerate(lines) if line.startswith("All ranks of the group"))
    begin = max(i for i, line in enumerate(lines[:end]) if "worker group " in line)
    return "\n".join(lines[begin : end + 1])


def test_a_killed_worker(
    lab: Lab, nodes: RealNodes, grpo: tuple[Path, Rows], tmp_path: Path
) -> None:
    """The first time the run goes on from its checkpoint; the second time it ends."""
    with running(lab, nodes, tmp_path, "trainer.max_restarts=1", steps(1000)) as process:
        wait_for_step(tmp_path, 2, process)
        first = nodes.processes_of_runs()
        ranks = nodes.ranks()
        os.kill(ranks[0], signal.SIGKILL)
        wait_for(lambda: not any(map(nodes.is_running, ranks)), "the end of the group")
        saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
        wait_for_step(tmp_path, saved + 2, process)
        second = nodes.processes_of_runs()
        (killed,) = nodes.others[0].ranks()
        os.kill(killed, signal.SIGKILL)
        output, _ = process.communicate(timeout=WAIT_S)
    assert len(first) == len(second) == 3 and len(first.keys() & second.keys()) == 1  # the driver
    assert process.returncode == 2, output
    assert "restarting from the last checkpoint; 0 left" in output
    assert output.count("All ranks of the group have been ended.") == 2
    screen = screen_of(output)
    assert re.search(r"worker group actor_rollout: rank [01] of 2 failed ", screen)
    assert "its process was killed, or crashed" in screen.splitlines()[1]
    (log,) = re.findall(rf"  log: 127\.0\.0\.2:(.*-{killed}\.err)", screen)
    assert Path(log).is_file()
    lab.assert_same(lab.metrics(tmp_path)[:4], grpo[1][:4])
    wait_for(lambda: nodes.processes_of_runs() == {}, "orphans")


def test_a_node_that_disappears(
    lab: Lab, nodes: RealNodes, grpo: tuple[Path, Rows], tmp_path: Path
) -> None:
    """When another one has taken its place, the run ends like one that nothing happened to."""
    more = ("trainer.max_restarts=1", steps(STEPS), *lab.holding(tmp_path / "go"))
    with running(lab, nodes, tmp_path / "run", *more) as process:
        wait_for_step(tmp_path / "run", 2, process)
        (lost,) = nodes.others
        (rank,) = lost.ranks()
        lost.lose()
        (tmp_path / "go").touch()
        wait_for(lambda: not nodes.is_running(rank), "an orphan of the lost node")
        nodes.add()
        output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, output
    screen = screen_of(output)
    assert re.search(r"worker group actor_rollout: rank [01] of 2 failed ", screen)
    assert "its node has died" in screen.splitlines()[1]
    assert re.search(rf"  log: 127\.0\.0\.2:.*-{rank}\.err", screen)
    assert "restarting from the last checkpoint; 0 left" in output
    lab.assert_same(lab.metrics(tmp_path / "run"), grpo[1])
    wait_for(lambda: nodes.processes_of_runs() == {}, "orphans")


API_SCRIPT = """
import caldera

def right(response, answer):
    return float(response.strip() == answer)

def stop(step, metrics):
    if step == 1:
        raise caldera.StopTraining("enough")

rows = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a in range(5) for b in range(5)]
run = caldera.grpo("MODEL", rows, right, n=4, steps=3, batch_size=6, mini_batch_size=6,
                   max_prompt_length=6, max_response_length=4, processes=1, nnodes=2,
                   callbacks=[stop], worker_group="ray", output="run")
run.train()
print(len(run.metrics), "reward/failed" in run.metrics[0], run.generate(["1+1"]))
"""


def test_a_script_of_the_python_api(lab: Lab, nodes: RealNodes, tmp_path: Path) -> None:
    """Its reward and callback travel to Ray's actors."""
    script = tmp_path / "script.py"
    script.write_text(API_SCRIPT.replace("MODEL", str(lab.model)))
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=on_ray(lab, nodes.address).environment,
        text=True, capture_output=True, check=False, timeout=WAIT_S * 2,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("1 ")
