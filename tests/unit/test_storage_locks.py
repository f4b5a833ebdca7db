"""Folders that one process at a time may write."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from caldera.errors import ConfigError
from caldera.storage.locks import LOCK, locked_folder, remove_locked

KEY = "trainer.default_local_dir='run'"
HOLDER = """
import os, sys, time
from pathlib import Path
from caldera.storage.locks import locked_folder

with locked_folder(Path(sys.argv[1]), "key"):
    if os.fork() == 0:  # which has let go of the lock by now
        print(os.getpid(), flush=True)
    time.sleep(600)
"""


def test_a_second_one_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with locked_folder(folder, KEY):
        (folder / "kept").touch()
        expected = re.escape(f"{KEY}: another run is writing it (PID {os.getpid()} on ")
        with pytest.raises(ConfigError, match=expected), locked_folder(folder, KEY):
            pass
        assert (folder / LOCK).exists()
    assert [path.name for path in folder.iterdir()] == ["kept"]
    with locked_folder(folder, KEY):
        pass


def test_of_a_killed_process_nothing_has_to_be_cleaned_up(tmp_path: Path) -> None:
    """Nor do processes that it has forked keep its lock."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        with pytest.raises(ConfigError, match=f"PID {holder.pid} "), locked_folder(tmp_path, KEY):
            pass
        holder.kill()
        holder.wait()
        os.kill(child, 0)  # it is still there
        try:
            with locked_folder(tmp_path, KEY):
                assert f"PID {os.getpid()} " in (tmp_path / LOCK).read_text()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_folder_that_was_not_used_is_not_left(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a mistake"), locked_folder(tmp_path / "run", KEY):
        raise ValueError("a mistake")
    assert not (tmp_path / "run").exists()
    with locked_folder(tmp_path, KEY):
        pass
    assert tmp_path.exists()


def test_a_folder_that_is_removed_can_be_begun_again(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    with locked_folder(folder, KEY):
        (folder / "logs").mkdir()
        (folder / "part").touch()
        remove_locked(folder)
        assert not folder.exists()
        with locked_folder(folder, KEY):  # another one, under the same name
            (folder / "part").touch()
    assert [path.name for path in folder.iterdir()] == ["part"]


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_place_that_cannot_be_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=re.escape(KEY)), locked_folder(tmp_path / place, KEY):
        pass
