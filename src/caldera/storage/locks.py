"""Folders that one process at a time may write."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from caldera.errors import ConfigError

logger = logging.getLogger(__name__)

LOCK = ".lock"
"""The file of a folder that is locked; it says who has it. Left by a killed process it means
nothing."""

_held: set[int] = set()


def _forget_locks() -> None:
    """A forked process must not keep the lock of a parent that has been killed."""
    for held in _held:
        os.close(held)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


@contextmanager
def locked_folder(folder: Path, told: str) -> Iterator[None]:
    """Make the folder if need be; meanwhile no other process has its lock.

    One that has it already is an error; `told` is `key='value'` for the message. The lock ends
    with this process, however that ends.
    """
    is_made_here = not folder.exists()
    held = _lock(folder / LOCK, told)
    _held.add(held)
    try:
        yield
    finally:
        if _is_still(held, folder / LOCK):
            (folder / LOCK).unlink()
        if is_made_here:
            with suppress(OSError):  # it is in use, as it should be
                folder.rmdir()
        _held.remove(held)
        os.close(held)


@contextmanager
def locked_file(path: Path, told: str) -> Iterator[None]:
    """The same for one file, which need not be there; its lock is `.NAME.lock` beside it."""
    lock = path.with_name(f".{path.name}{LOCK}")
    held = _lock(lock, told)
    _held.add(held)
    try:
        yield
    finally:
        if _is_still(held, lock):
            lock.unlink()
        _held.remove(held)
        os.close(held)


def empty_locked(folder: Path) -> None:
    """Remove what is in a folder that this process has locked."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def remove_locked(folder: Path) -> None:
    """Remove a folder that this process has locked; what another one begins there meanwhile, once
    the lock is gone, is left alone."""
    empty_locked(folder)
    (folder / LOCK).unlink()
    with suppress(OSError):
        folder.rmdir()


def _lock(file: Path, told: str) -> int:
    while True:
        held = _opened(file, told)
        if held is None:  # whoever had the lock has removed the folder in between
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(held, 1000).decode(errors="replace").strip()
            os.close(held)
            raise ConfigError(
                f"{told}: another run is writing it{f' ({holder})' if holder else ''}; wait for "
                "that one to end, or take another"
            ) from None
        except OSError as error:
            logger.warning("%s has no lock, so that no other run is refused: %s", told, error)
        # Whoever had the lock may have removed the file before it let go.
        if _is_still(held, file):
            os.ftruncate(held, 0)
            os.write(held, f"PID {os.getpid()} on {socket.gethostname()}\n".encode())
            return held
        os.close(held)


def _opened(file: Path, told: str) -> int | None:
    """The file, open, in a folder that is made if need be; None if that is gone again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            return os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigError(f"{told}: cannot be written: {error}") from error
    return None


def _is_still(held: int, file: Path) -> bool:
    """Whether the open file is the one of this name."""
    try:
        return os.path.samestat(os.fstat(held), file.stat())
    except FileNotFoundError:
        return False
