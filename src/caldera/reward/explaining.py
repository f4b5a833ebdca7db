"""The exception or the return value of a score function, in a line."""

from __future__ import annotations

import functools
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from caldera.data.importing import own_frames

# ---- A score function in a thread shares its process with the run, and may not end it


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


LONGEST_LINE = 500  # characters


def explain(error: BaseException) -> str:
    """One line: what a score function raised, and where in the user's own code."""
    try:
        frames = own_frames(error) or list(traceback.extract_tb(error.__traceback__))
    except Exception:  # noqa: BLE001 -- an exception of the user's may have custom attributes
        frames = []
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"the score function raised {in_words(error)}{where}"


def in_words(error: BaseException) -> str:
    """One line: the kind of an error, and its message."""
    said = shown(error, str)
    return f"{_kind(error)}: {said}" if said else _kind(error)


def shown(value: Any, how: Callable[[Any], str] = repr) -> str:
    """One line that shows a value of a score function's, whatever its own `__repr__` does."""
    try:
        with no_exit():
            return first_line(how(value))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 -- it is the user's code that runs
        return f"<{_kind(value)} whose text raises {_kind(error)}>"


def _kind(value: Any) -> str:
    """The name of its type, which a metaclass may hide."""
    name: str = type.__dict__["__name__"].__get__(type(value))
    return name


def writable(text: str) -> str:
    """The text with escapes for lone surrogates, which no file and no console can hold."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def first_line(text: str) -> str:
    """The first line, cut where it is too long to read, of characters that can be written."""
    line = text.strip().partition("\n")[0]
    line = line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..."
    return writable(line)
