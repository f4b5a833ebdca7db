"""The exception or the return value of a score function, in a line."""

from __future__ import annotations

import functools
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from caldera.data.importing import own_frames

T = TypeVar("T")

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


def apart(function: Callable[[], T], otherwise: Callable[[BaseException], T]) -> T:
    """What the function returns, or `otherwise` of what it raises; for methods of the user's.

    In a thread, where a KeyboardInterrupt is none of Ctrl-C's, which raises in the main one.
    """
    done: list[T] = []

    def work() -> None:
        try:
            with no_exit():
                done.append(function())
        except BaseException as error:  # noqa: BLE001 -- it is the user's code that runs
            done.append(otherwise(error))

    thread = threading.Thread(target=work, name="explaining", daemon=True)
    thread.start()
    thread.join()
    return done[0]


LONGEST_LINE = 500  # characters
LONGEST_TRACED = 10_000  # characters of an exception that is shown with its traceback


def explain(error: BaseException) -> str:
    """One line: what a score function raised, and where in the user's own code."""
    return f"the score function raised {in_words(error)}{apart(lambda: _where(error), _nowhere)}"


def _where(error: BaseException) -> str:
    frames = own_frames(error) or list(traceback.extract_tb(error.__traceback__))
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _nowhere(_: BaseException) -> str:
    """An exception of the user's may have custom attributes."""
    return ""


def traced(error: BaseException) -> str:
    """The traceback of what a score function raised; a line, where it is too long to read."""

    def text() -> str:
        is_short = len(str(error)) <= LONGEST_TRACED
        return "".join(traceback.format_exception(error)).rstrip() if is_short else in_words(error)

    return writable(apart(text, lambda _: in_words(error)))


def in_words(error: BaseException) -> str:
    """One line: the kind of an error, and its message."""
    said = shown(error, str)
    return f"{_kind(error)}: {said}" if said else _kind(error)


def shown(value: Any, how: Callable[[Any], str] = repr) -> str:
    """One line that shows a value of a score function's, whatever its own `__repr__` does."""
    return apart(
        lambda: first_line(how(value)),
        lambda error: f"<{_kind(value)} whose text raises {_kind(error)}>",
    )


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
