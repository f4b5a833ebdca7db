"""Copies of what URLs name, in a cache folder.

    {cache}/{URL}/{version}/{name}    a file, or a folder of files; whole
    {cache}/{URL}/.{version}/         one that is being fetched, or that a killed process left
    {cache}/{URL}.lock

The version is made of the names, sizes and marks of all files, so that what has changed in the
store is fetched again, while readers of the older version can go on.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from caldera.errors import ConfigError
from caldera.storage.paths import shown_url
from caldera.storage.store import Store, StoredFile, Transfer, reason_of, retried
from caldera.storage.writing import flush

logger = logging.getLogger(__name__)


# ---- Progress of a transfer, for those that wait; retries of what a store may have dropped


DELAYS = (0.5, 2.0)
"""Seconds before a store is asked again."""
AT_A_TIME = 4
"""Files that are fetched side by side."""
UNUSED_S = 7 * 24 * 3600.0
"""How long an older version is kept after its last use."""

_fetched: dict[tuple[str, Path, tuple[str, ...]], Path] = {}


def fetch_once(url: str, key: str, cache: Path, skip: tuple[str, ...] = ()) -> Path:
    """The same as `fetch`; the store is asked once in a process, so that a run sees one version."""
    for wanted in ((url, cache, ()), (url, cache, skip)):  # what has all files has these, too
        if wanted in _fetched and _fetched[wanted].exists():
            return _fetched[wanted]
    _fetched[url, cache, skip] = fetch(url, key, cache, skip)
    return _fetched[url, cache, skip]


def fetch(url: str, key: str, cache: Path, skip: tuple[str, ...] = ()) -> Path:
    """The local copy of what a URL names, fetched unless there is one of the same version.

    `key` is the config key that the URL came from. Files whose names end in one of `skip` are left
    out. Several processes may ask at once: one fetches, the others wait for it.
    """
    store = Store(url, key)
    try:
        found = retried(store.files, DELAYS, f"asking for {shown_url(url)}")
        files = [file for file in found if not file.name.endswith(skip)]
        return _current(store, files, cache / _digest(url, *skip))
    except FileNotFoundError as error:
        raise ConfigError(f"{store.told}: there is no such file or folder") from error
    except OSError as error:
        raise ConfigError(
            f"{store.told}: cannot be fetched into {cache}: {reason_of(error)}"
        ) from error


def _current(store: Store, files: Sequence[StoredFile], place: Path) -> Path:
    version = _digest(*(f"{file.name}\n{file.size}\n{file.mark}" for file in files))
    final, partial = place / version, place / f".{version}"
    place.mkdir(parents=True, exist_ok=True)
    with _locked(place.with_suffix(".lock"), store.url):
        copy = final / store.name
        if not copy.exists():
            _download(store, files, partial)
            try:
                partial.rename(final)
            except OSError:
                if not copy.exists():  # else another process was first, where there are no locks
                    raise
            os.utime(final)
            _remove_unused(place)
        os.utime(final)
    return copy


def _download(store: Store, files: Sequence[StoredFile], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    title = f"fetching {shown_url(store.url)}"
    transfer = Transfer(title, sum(file.size or 0 for file in files))
    pool = ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="fetch")

    def start(file: StoredFile) -> Future[None]:
        aside = folder.with_name(f".part-{uuid.uuid4().hex}")
        target = folder / store.name / file.name
        return pool.submit(_download_file, store, file, target, aside, transfer)

    try:
        for done in as_completed([start(file) for file in files]):
            done.result()
    except BaseException:  # also of a person who has waited long enough
        transfer.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    transfer.end()


def _download_file(
    store: Store, file: StoredFile, target: Path, aside: Path, transfer: Transfer
) -> None:
    if target.exists():  # of a process that was killed before the others were here
        transfer.add(file.size or 0)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        title = f"fetching {shown_url(file.path)}"
        retried(lambda: store.get(file, aside, transfer), DELAYS, title)
        flush(aside)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def _remove_unused(place: Path) -> None:
    """Older versions, and what killed processes left, once nobody can be reading them any more."""
    for path in place.iterdir():
        if time.time() - path.stat().st_mtime <= UNUSED_S:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def _locked(file: Path, url: str) -> Iterator[None]:
    with file.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that is fetching %s", shown_url(url))
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            # Of a file system without locks. Every file is renamed into its place when it is
            # whole, so that the worst is that two processes fetch the same.
            logger.debug("no lock on %s: %s", file, error)
        yield


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
