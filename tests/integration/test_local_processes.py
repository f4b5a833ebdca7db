"""Groups of two real processes: calls, shared memory, and every way to fail."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from caldera.errors import ProtocolError, WorkerError
from caldera.protocol import DataProto, DataProtoFuture
from caldera.single_controller import (
    ClassWithInitArgs,
    LocalWorkerGroup,
    ProcessWorkerGroup,
    ResourcePool,
    create_colocated_worker_cls,
)
from tests.integration import process_workers
from tests.integration.process_workers import Other, Probe, Unbuildable

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 60.0
"""How long what is about to happen may take on a busy machine."""

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs a POSIX system")


def start(recipe: ClassWithInitArgs | None = None, name: str = "", **options: Any) -> Any:
    group = LocalWorkerGroup(ResourcePool([2]), recipe or ClassWithInitArgs(Probe), name, **options)
    assert isinstance(group, ProcessWorkerGroup)
    return group


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """For the tests that leave it in order."""
    torch.manual_seed(5)
    made = start(ClassWithInitArgs(Probe, label="first"), "shared_group")
    yield made
    made.shutdown()


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Groups that a test may break."""
    made = []

    def make(recipe: ClassWithInitArgs | None = None, **options: Any) -> Any:
        made.append(start(recipe, "broken", log_dir=tmp_path / "logs", **options))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


def rows(*values: int, **options: Any) -> DataProto:
    names = np.array([f"row {value}" for value in values], dtype=object)
    return DataProto.from_dict({"x": torch.tensor(values)}, {"name": names}, **options)


def x_of(data: Any) -> list[int]:
    found: list[int] = data.batch["x"].tolist()
    return found


def is_running(pid: int) -> bool:
    """Whether it runs; one that has ended and waits for its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while it is read
        return False
    return state != "Z"


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} still run"
        time.sleep(0.05)


# ---- a group in order


def test_ranks_know_their_place_and_each_other(group: Any) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WG_PREFIX"]
    assert group.whereabouts(*names) == [
        (0, 2, ["0", "2", "0", "2", "shared_group"]),
        (1, 2, ["1", "2", "1", "2", "shared_group"]),
    ]
    assert group.sum_over_ranks(1.5) == [4.5, 4.5]
    first, second = group.facts()
    assert len({first["pid"], second["pid"], os.getpid()}) == 3
    assert (first["label"], first["backend"]) == ("first", "gloo")
    assert first["threads"] >= 1
    assert first["master"] == second["master"] == (group.master_address, group.master_port)
    assert first["torch"] == torch.rand(1, generator=torch.Generator().manual_seed(5)).item()
    assert first["torch"] != second["torch"]
    assert first["numpy"] == np.random.RandomState(5).rand()


def test_every_mode(group: Any) -> None:
    assert group.rank_zero([1, 2]) == (0, [1, 2])
    assert group.all_to_all(["a", "b"]) == [(0, "a"), (1, "b")]
    assert group.dp_compute(["a", "b"]) == [(0, "a"), (1, "b")]
    assert group.first_alone() == 0
    assert group.count(rows(1, 2, 3, 4)) == [2, 2]
    answer = group.add_rank(rows(1, 2, 3, 4), factor=10)
    assert x_of(answer) == [1, 2, 13, 14]
    assert answer.non_tensor_batch["name"].tolist() == ["row 1", "row 2", "row 3", "row 4"]
    assert answer.meta_info == {"metrics": {"rows": [2, 2]}}
    got = group.execute_with_func_generator(process_workers.first_name, rows(1, 2, 3, 4))
    assert x_of(got) == [10, 20, 31, 41]
    assert group.execute_func_rank_zero(max, 3, 4) == 4
    assert group.execute_all_sync("rank_zero", [5, 6]) == [(0, 5), (1, 6)]
    assert group.execute_rank_zero_sync("rank_zero", [5, 6]) == (0, [5, 6])


def test_meshes(group: Any) -> None:
    assert x_of(group.on_shared_mesh(rows(1, 2, 3))) == [11, 12, 13]  # both ranks had all rows
    assert x_of(group.on_reversed_mesh(rows(1, 2, 3, 4))) == [11, 12, 3, 4]


def test_padding(group: Any) -> None:
    answer = group.add_rank(rows(1, 2, 3, auto_padding=True))
    assert x_of(answer) == [1, 2, 4]
    assert answer.meta_info["metrics"] == {"rows": [2, 2]}
    with pytest.raises(ProtocolError, match="3 rows do not make 2 equal chunks"):
        group.add_rank(rows(1, 2, 3))


def test_only_what_is_needed_crosses(group: Any) -> None:
    data = rows(1, 2)
    assert data.batch is not None
    data.batch["unneeded"] = torch.zeros(2, 1000)
    assert group.keys(data).meta_info["metrics"]["keys"] == [["name", "x"]] * 2
    assert not data.batch["unneeded"].is_shared()


def test_batches_are_shared_and_not_copied(group: Any) -> None:
    data = rows(1, 2, 3, 4)
    assert data.batch is not None
    assert group.overwrite(data).batch["was_shared"].tolist() == [True] * 4
    assert x_of(data) == [100, 100, 101, 101]
    before = data.batch["x"].data_ptr()
    group.overwrite(data)
    assert data.batch["x"].data_ptr() == before


def test_answers_are_shared_and_not_copied(group: Any) -> None:
    answers = group.keep()
    group.fill_kept(7.0)
    assert [answer.batch["kept"].tolist() for answer in answers] == [[7, 7, 7]] * 2


def test_calls_of_two_groups_overlap(group: Any, tmp_path: Path) -> None:
    other = start(name="second")
    try:
        future = group.once_there_is(rows(1, 2, 3, auto_padding=True), tmp_path / "sign")
        assert isinstance(future, DataProtoFuture)
        other.make(tmp_path / "sign")  # would never be called if the first call blocked
        assert x_of(other.add_rank(future)) == [1, 2, 4]
        assert x_of(future.get()) == [1, 2, 3]
    finally:
        other.shutdown()


def test_large_calls_wait_for_each_other(group: Any) -> None:
    """Neither side blocks the other, although no pipe holds that much."""
    large = [["x" * 500_000], ["y" * 500_000]]
    pending = [group.echo_later(value) for value in large for _ in range(3)]
    answers = [[answer.result() for answer in answers] for answers in reversed(pending)]
    assert answers == [[value] * 2 for value in reversed(large) for _ in range(3)]


def test_what_cannot_be_sent_reaches_nobody(group: Any) -> None:
    with pytest.raises((TypeError, AttributeError), match="pickle"):
        group.all_to_all([1, lambda: None])
    assert group.all_to_all([1, 2]) == [(0, 1), (1, 2)]


def test_what_ranks_write_is_in_their_logs(group: Any) -> None:
    group.say("hello")
    logs = [Path(group.log_dir / f"shared_group_rank{rank}.log").read_text() for rank in (0, 1)]
    assert "rank 0 alone says hello" in logs[0]
    assert "rank 0 says hello" in logs[0]
    assert "rank 1 says hello" in logs[1]
    assert "alone" not in logs[1]


def test_a_group_that_ends_well(tmp_path: Path) -> None:
    group = start()
    pids = [fact["pid"] for fact in group.facts()]
    assert group.is_alive(0)
    group.shutdown()
    group.shutdown()
    assert not any(is_running(pid) for pid in pids)
    assert not group.is_alive(0)
    assert not group.log_dir.exists()
    with pytest.raises(WorkerError, match=r"^worker group Probe has been shut down$"):
        group.facts()


def test_several_roles_in_the_same_processes(broken: Callable[..., Any]) -> None:
    recipe = create_colocated_worker_cls(
        {"probe": ClassWithInitArgs(Probe, label="mine"), "other": ClassWithInitArgs(Other)}
    )
    group = broken(recipe)
    roles = group.spawn({"probe", "other"})
    assert roles["other"].label_of_probe() == [(0, "mine"), (1, "mine")]
    assert x_of(roles["probe"].on_reversed_mesh(rows(1, 2))) == [11, 2]
    assert x_of(roles["probe"].add_rank(rows(1, 2, 3, auto_padding=True))) == [1, 2, 4]
    with pytest.raises(WorkerError, match="rank 1 of 2 failed in other_raise_in"):
        roles["other"].raise_in(1)
    with pytest.raises(WorkerError, match="worker group broken was ended after a failure"):
        roles["probe"].facts()


# ---- failures


def failure_of(call: Callable[[], Any]) -> list[str]:
    """The screen, line by line."""
    with pytest.raises(WorkerError) as caught:
        call()
    return str(caught.value).splitlines()


def block(screen: list[str], rank: int) -> str:
    """What the screen says of a rank."""
    starts = [i for i, line in enumerate(screen) if not line.startswith(" ")]
    ends = dict(itertools.pairwise(starts))
    (found,) = [i for i in starts if f"rank {rank} " in screen[i]]
    return "\n".join(screen[found : ends[found]])


def test_an_exception_while_another_rank_waits(broken: Callable[..., Any]) -> None:
    group = broken()
    pids = [fact["pid"] for fact in group.facts()]
    programs = group.start_program()
    screen = failure_of(lambda: group.raise_in(1))
    assert screen[:2] == [
        "worker group broken: rank 1 of 2 failed in raise_in",
        "  ValueError: rank 1 cannot go on",
    ]
    assert "process_workers.py" in block(screen, 1)
    assert "rank 0 was still in raise_in" in block(screen, 0)
    assert "process_workers.py" in block(screen, 0)
    assert " in all_reduce" in block(screen, 0)
    for rank in (0, 1):
        log = group.log_dir / f"broken_rank{rank}.log"
        assert f"log: {log}" in block(screen, rank)
        assert log.exists()
    assert "ValueError: rank 1 cannot go on" in (group.log_dir / "broken_rank1.log").read_text()
    assert not any(is_running(pid) for pid in pids)
    wait_until_gone(*programs)
    assert failure_of(group.facts) == ["worker group broken was ended after a failure"]


def test_a_rank_that_is_killed(broken: Callable[..., Any]) -> None:
    group = broken()
    screen = failure_of(lambda: group.killed(1, signal.SIGKILL))
    assert screen[0] == "worker group broken: rank 1 of 2 failed in killed"
    assert screen[1].startswith("  its process was killed by SIGKILL")
    assert "about to be killed" in block(screen, 1)
    assert "rank 0 " in "\n".join(screen)


def test_a_rank_that_is_killed_between_calls(broken: Callable[..., Any]) -> None:
    group = broken()
    pids = [fact["pid"] for fact in group.facts()]
    process_workers.kill(pids[0])
    wait_until_gone(pids[0])
    screen = failure_of(lambda: group.sum_over_ranks(1.0))
    assert screen[0].startswith("worker group broken: rank 0 of 2 failed ")
    assert "killed by SIGKILL" in screen[1]
    wait_until_gone(*pids)


def test_a_rank_that_is_killed_before_its_answer_is_read(broken: Callable[..., Any]) -> None:
    """The tensors of an answer are handed over by the process that made them."""
    group = broken()
    pids = [fact["pid"] for fact in group.facts()]
    answers = group.execute_all_async("keep")
    assert group._ranks[1].connection.poll(PATIENCE_S)  # it has answered
    process_workers.kill(pids[1])
    wait_until_gone(pids[1])
    screen = failure_of(lambda: [answer.result() for answer in answers])
    assert screen[0].startswith("worker group broken: rank 1 of 2 failed ")
    assert "killed by SIGKILL" in screen[1]


def test_a_rank_that_exits(broken: Callable[..., Any]) -> None:
    screen = failure_of(lambda: broken().exit_in(0, 7))
    assert screen[0] == "worker group broken: rank 0 of 2 failed in exit_in"
    assert screen[1] == "  its process exited with status 7"
    assert "rank 1 was still in exit_in" in block(screen, 1)


def test_a_rank_that_never_answers(broken: Callable[..., Any]) -> None:
    group = broken(timeout_s=3)
    screen = failure_of(lambda: group.sleep_in(1))
    assert screen[0] == "worker group broken: rank 1 of 2 failed in sleep_in"
    assert screen[1] == "  no answer for 3 s"
    assert "process_workers.py" in block(screen, 1)
    assert not any(line.startswith("rank 0 ") for line in screen)  # it had answered


def test_a_failure_of_a_call_that_does_not_block(broken: Callable[..., Any]) -> None:
    group = broken()
    pending = group.execute_all_async("raise_in", 0)
    later = group.echo_later("never")
    assert failure_of(pending[1].result)[0] == (
        "worker group broken: rank 0 of 2 failed in raise_in"
    )
    assert failure_of(later[0].result) == ["worker group broken was ended after a failure"]


def test_an_answer_that_cannot_be_sent(broken: Callable[..., Any]) -> None:
    screen = failure_of(broken().not_to_be_sent)
    assert screen[0] == "worker group broken: rank 1 of 2 failed in not_to_be_sent"
    assert "pickle" in screen[1]


def test_a_worker_that_cannot_be_built(broken: Callable[..., Any]) -> None:
    screen = failure_of(lambda: broken(ClassWithInitArgs(Unbuildable)))
    assert screen[:2] == [
        "worker group broken: rank 1 of 2 failed in __init__",
        "  FileNotFoundError: no such model: /models/none",
    ]


CONTROLLER = f"""
import subprocess, sys, time
sys.path.append({str(REPOSITORY)!r})
from tests.integration.process_workers import Probe
from caldera.single_controller import ClassWithInitArgs, LocalWorkerGroup, ResourcePool, processes
if __name__ == "__main__":
    processes.PRELOADED[:] = ["torch"]
    group = LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Probe))
    pids = [fact["pid"] for fact in group.facts()]
    print(*pids, *group.start_program(), flush=True)
    if sys.argv[1] == "busy":
        group.sleep_in(0)
"""


@pytest.mark.parametrize("ends", ["killed", "normally"])
def test_no_process_outlives_the_controller(ends: str, tmp_path: Path) -> None:
    script = tmp_path / "controller.py"
    script.write_text(CONTROLLER)
    how = "busy" if ends == "killed" else "idle"
    paths = os.pathsep.join(filter(None, [str(REPOSITORY / "src"), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, script, how],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, "TMPDIR": str(tmp_path)},
    ) as controller:
        assert controller.stdout is not None
        pids = [int(pid) for pid in controller.stdout.readline().split()]
        assert len(pids) == 4
        if ends == "killed":
            assert all(is_running(pid) for pid in pids)
            controller.kill()
    wait_until_gone(*pids)
    assert controller.returncode == (-signal.SIGKILL if ends == "killed" else 0)
    if ends == "normally":
        assert list(tmp_path.iterdir()) == [script]  # nor do its temporary files
