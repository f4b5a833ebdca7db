"""Clusters for the whole folder: one that Ray's own test tool makes, and one of real nodes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # what Ray would otherwise warn of
os.environ |= {"RAY_memory_monitor_refresh_ms": "0"}  # it kills when others fill the memory

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 120.0
"""How long what is about to happen may take on a busy machine."""
OF_A_RUN = ("ray::RankActor", "ray::TaskRunner")
"""How the titles of a run's processes on a cluster begin: the ranks, and the driver."""
QUICK_TO_NOTICE = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""Has the head give up a node that is gone after 3 seconds instead of 15."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A head node with 4 CPUs and 2 GPUs that exist on paper alone; the tests are connected."""
    os.environ["PYTHONPATH"] = str(REPOSITORY / "src")
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "num_gpus": 2, "include_dashboard": False},
    )
    ray.init(address=cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def by_value() -> Callable[[str], ModuleType]:
    """Have Ray send the classes of a test file whole: its actors cannot import it."""

    def register(module_name: str) -> ModuleType:
        module = sys.modules[module_name]
        ray.cloudpickle.register_pickle_by_value(module)
        return module

    return register


@pytest.fixture(scope="session")
def wait_for() -> Callable[[Callable[[], bool], str], None]:
    """Wait until something is so; where it never is, the test fails and says what."""

    def wait(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.05)

    return wait


class Node:
    """A node as examples/cluster starts it: processes, ports and an address of its own."""

    def __init__(self, script: str, address: str, *options: str, **variables: str) -> None:
        # Sockets lie in this folder, and their paths must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))
        command = [
            str(REPOSITORY / "examples/cluster" / script), address, *options,
            "--min-worker-port=0", "--max-worker-port=0",  # any that other clusters do not have
            f"--temp-dir={self.folder}", "--block",
        ]  # fmt: skip
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = (
            os.environ | {"PATH": programs, "PYTHONPATH": str(REPOSITORY / "src")} | variables
        )
        self._output = self.folder / "output"
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while "Ray runtime started" not in self._output.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, (
                self._output.read_text()
            )
            time.sleep(0.1)

    @property
    def raylet(self) -> int:
        (pid,) = (
            pid for pid, title in children(self.process.pid).items() if "raylet/raylet" in title
        )
        return pid

    def processes_of_runs(self) -> dict[int, str]:
        """Process id -> title."""
        if self.process.poll() is not None:
            return {}
        return {p: t for p, t in children(self.raylet).items() if t.startswith(OF_A_RUN)}

    def ranks(self) -> list[int]:
        return [p for p, title in self.processes_of_runs().items() if title.startswith(OF_A_RUN[0])]

    def lose(self) -> None:
        """As if the machine were gone: nobody is told."""
        os.kill(self.raylet, signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        shutil.rmtree(self.folder, ignore_errors=True)


def living() -> dict[int, tuple[int, str]]:
    """Process id -> parent and title, of every process that has not ended."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            title = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it ended in between
            continue
        if state != "Z":
            found[int(folder.name)] = int(parent), title
    return found


def children(parent: int) -> dict[int, str]:
    """Process id -> title."""
    return {pid: title for pid, (its_parent, title) in living().items() if its_parent == parent}


class RealNodes:
    """A head with places for a driver and one rank, and any number of nodes for one rank each."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        self.address = f"127.0.0.1:{port}"
        self.head = Node(
            "start_head.sh", "127.0.0.1", "--num-cpus=2", "--include-dashboard=false",
            RAY_PORT=port, **QUICK_TO_NOTICE,
        )  # fmt: skip
        self.others: list[Node] = []

    def add(self) -> Node:
        number = len(self.others) + 2
        node = Node(
            "start_worker.sh", self.address, "--num-cpus=1", "--include-log-monitor=false",
            f"--node-ip-address=127.0.0.{number}",
        )  # fmt: skip
        self.others.append(node)
        node.wait_until_ready()
        return node

    def ranks(self) -> list[int]:
        return [pid for node in (self.head, *self.others) for pid in node.ranks()]

    def processes_of_runs(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for node in (self.head, *self.others):
            found |= node.processes_of_runs()
        return found

    def restore(self) -> None:
        """Have a second node again if a test has lost it and not come to add another."""
        if all(node.process.poll() is not None for node in self.others):
            self.add()

    @staticmethod
    def is_running(pid: int) -> bool:
        return pid in living()

    def end(self) -> None:
        for node in (*self.others, self.head):
            node.end()


@pytest.fixture
def nodes(nodes_of_session: RealNodes) -> Iterator[RealNodes]:
    """A real head and at least one more real node."""
    try:
        yield nodes_of_session
    finally:
        nodes_of_session.restore()


@pytest.fixture(scope="session")
def nodes_of_session() -> Iterator[RealNodes]:
    """A real head and a second real node on this machine, which examples/cluster has started."""
    nodes = RealNodes()
    try:
        nodes.head.wait_until_ready()
        nodes.add()
        yield nodes
    finally:
        nodes.end()
