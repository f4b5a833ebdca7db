"""Writes that fail because a disk is full."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from caldera.storage.locks import full_disk

Usage = namedtuple("Usage", ["total", "used", "free"])


def test_an_error_that_says_so(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    missing = tmp_path / "that/could/not/be/made"
    told = full_disk(full, missing)
    assert told is not None
    free = shutil.disk_usage(tmp_path).free / 1e6
    assert told.startswith(f"no space left on the disk of {missing} (")
    assert float(told.partition("(")[2].split()[0]) == pytest.approx(free, rel=0.5)
    hidden = RuntimeError("unexpected pos 704 vs 598")
    hidden.__context__ = full
    assert full_disk(hidden, tmp_path) is not None
    assert full_disk(RuntimeError('message: "No space left on device"'), tmp_path) is not None


def test_an_error_that_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = RuntimeError("unexpected pos 704 vs 598")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 0, 10**9))
    assert full_disk(hidden, tmp_path) is None
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 2_000_000))
    assert full_disk(hidden, tmp_path) == f"no space left on the disk of {tmp_path} (2 MB free)"
