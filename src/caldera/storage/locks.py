"""Folders that one process at a time may write."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from caldera.errors import ConfigError

logger = logging.getLogger(__name__)


LOCK = ".lock"
"""The file of a folder that is locked; it names the holder. Left by a killed process it means
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
    try:
        with _locked(folder / LOCK, told):
            yield
    finally:
        if is_made_here:
            with suppress(OSError):  # it is in use, as it should be
                folder.rmdir()


@contextmanager
def locked_file(path: Path, told: str) -> Iterator[None]:
    """The same for one file, which need not be there; its lock is `.NAME.lock` beside it."""
    with _locked(path.with_name(f".{path.name}{LOCK}"), told):
        yield


@contextmanager
def _locked(lock: Path, told: str) -> Iterator[None]:
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
        if held is None:  # the holder of the lock has removed the folder in between
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
        # The holder of the lock may have removed the file before it let go.
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


# ---- Temporary folders that bear the name of their owner, so that none outlives it for long

_NAME = re.compile(r"-(\d+)-(\d+)-[^-]*")


def own_folder(kind: str, root: Path) -> Path:
    """A new folder of this process. Those of the kind whose process is gone are removed first: one
    that was killed could not."""
    for folder in root.glob(f"{kind}-*"):
        if _is_orphan(folder.name.removeprefix(kind)):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{kind}-{_namespace()}-{os.getpid()}-", dir=root))


def _is_orphan(name: str) -> bool:
    found = _NAME.fullmatch(name)
    if found is None or int(found[1]) != _namespace():
        return False
    try:
        os.kill(int(found[2]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is somebody else's
        return False
    return False


def _namespace() -> int:
    """Within which a process number means something: containers may share the folders alone."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


# ---- Writes that fail because a disk is full, whatever a library makes of that

NO_SPACE = "no space left on the disk"
SMALL = 16e6
"""Bytes: with fewer left, a write that failed has failed for want of space."""


def full_disk(error: BaseException, folder: Path) -> str | None:
    """The message for a write to this folder that failed; None if it was not for want of space."""
    free = shutil.disk_usage(_existing(folder)).free
    if free >= SMALL and not _says_so(error):
        return None
    return f"{NO_SPACE} of {folder} ({free / 1e6:.0f} MB free)"


def _says_so(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        is_told = os.strerror(errno.ENOSPC) in str(seen)  # libraries in other languages
        if is_told or (isinstance(seen, OSError) and seen.errno == errno.ENOSPC):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it: a full disk may have refused to make it."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
