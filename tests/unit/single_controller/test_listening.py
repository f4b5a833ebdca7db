"""What a group of one machine opens is not for others, and does not stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from caldera.single_controller import ClassWithInitArgs, ProcessWorkerGroup, ResourcePool, Worker
from caldera.single_controller.process_main import loopback_store

LISTENS = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1, and the first as the second's kind, as the kernel writes them."""

OWN = ("caldera-stacks-*", "caldera-logs-*")
"""Temporary folders of a group."""

needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")


def listening(process: int) -> set[str]:
    """The addresses that a process listens on."""
    inodes = set()
    for file in Path(f"/proc/{process}/fd").iterdir():
        if file.is_symlink() and (link := os.readlink(file)).startswith("socket:["):
            inodes.add(link[8:-1])
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == LISTENS and row[9] in inodes}


@needs_proc
def test_a_local_group_listens_on_loopback_alone(tmp_path: Path) -> None:
    before = listening(os.getpid())
    group = ProcessWorkerGroup(
        ResourcePool([2]), ClassWithInitArgs(Worker), "listening", log_dir=tmp_path
    )
    try:
        ranks = [listening(rank.process.pid or 0) for rank in group._ranks]
        controller = listening(os.getpid()) - before
    finally:
        group.shutdown()
    assert all(ranks), "gloo listens in every rank"
    assert set().union(controller, *ranks) <= LOOPBACK


@needs_proc
def test_the_store_of_a_local_group_listens_on_loopback_alone() -> None:
    code = (
        "import os; from caldera.single_controller.process_main import loopback_store; "
        "store = loopback_store(); print(os.getpid(), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        found = listening(int(process.stdout.readline()))
        process.communicate("\n")
    assert found == {"0100007F"}


def test_the_store_of_a_local_group_keeps_values() -> None:
    store = loopback_store()
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_group_removes_the_folders_of_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os, signal; from caldera.single_controller import *; "
        "group = ProcessWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Worker), 'killed'); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    left = [folder for kind in OWN for folder in tmp_path.glob(kind)]
    assert len(left) == len(OWN)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    group = ProcessWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Worker), "next")
    try:
        assert not any(folder.exists() for folder in left)
        assert all(len(list(tmp_path.glob(kind))) == 1 for kind in OWN)
    finally:
        group.shutdown()
    assert not [folder for kind in OWN for folder in tmp_path.glob(kind)]
