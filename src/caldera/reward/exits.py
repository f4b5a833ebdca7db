"""A score function in a thread shares its process with the run, and may not end it."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

__all__ = ["guard_exit", "no_exit"]


class _Guarded(threading.local):
    process: int | None = None
    """The process whose score function runs in this thread. A fork of it may end."""


_guarded = _Guarded()


@contextmanager
def no_exit() -> Iterator[None]:
    """Meanwhile `os._exit` raises SystemExit in this thread."""
    guard_exit()
    before, _guarded.process = _guarded.process, os.getpid()
    try:
        yield
    finally:
        _guarded.process = before


@functools.cache
def guard_exit() -> None:
    """Have `os._exit` heed `no_exit`: it would end the run without a word, and nothing else in
    Python gets to know of it. Called before a score function's file may import it by name."""
    leave = os._exit

    def exit_unless_guarded(status: int) -> NoReturn:
        if _guarded.process == os.getpid():
            raise SystemExit(f"it called os._exit({status})")
        leave(status)

    os._exit = exit_unless_guarded
