"""One file or folder of a store, whichever store it is, and how far a transfer is."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from http.client import HTTPResponse
from pathlib import Path
from posixpath import normpath
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import Request, urlopen

import fsspec.core
from fsspec import AbstractFileSystem
from fsspec.callbacks import DEFAULT_CALLBACK, Callback
from fsspec.registry import known_implementations

from caldera.errors import ConfigError
from caldera.storage.paths import check_name, check_names, shown_url

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Transfer:
    """Counts the bytes that have gone over, and writes a line now and then."""

    def __init__(self, title: str, total: int, seconds_between_lines: float = 10.0) -> None:
        self._title = title
        self._total = total
        self._interval = seconds_between_lines
        self._done = 0
        self._lock = threading.Lock()
        self._is_stopped = False
        self._started = self._last_line = self.moved = time.monotonic()

    def add(self, count: int) -> None:
        """So many bytes more."""
        with self._lock:
            if self._is_stopped:
                raise OSError("the transfer was stopped")
            self._done += count
            self.moved = time.monotonic()
            if count and self.moved - self._last_line >= self._interval:
                self._last_line = self.moved
                logger.info("%s", self.line())

    def stop(self) -> None:
        """Callers that go on transferring get an error."""
        self._is_stopped = True

    def end(self) -> None:
        """Tell how it went, if it took long enough to have been waited for."""
        if self._last_line != self._started:
            took = _clock(time.monotonic() - self._started)
            logger.info("%s: %s in %s", self._title, _bytes(self._done), took)

    def line(self) -> str:
        """`fetching s3://b/model: 2.5 of 10.0 GB, ETA 0:03:00`; 0 bytes in all means unknown."""
        if self._done <= 0 or self._total <= 0:
            return f"{self._title}: {_bytes(self._done)}"
        seconds = (self.moved - self._started) * (self._total - self._done) / self._done
        done, total = _bytes(self._done), _bytes(self._total)
        return f"{self._title}: {done} of {total}, ETA {_clock(seconds)}"


class CountedFile(Callback):  # type: ignore[misc]  # fsspec has no types
    """The counter of the bytes of one file, for stores."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__()
        self._transfer = transfer
        self._told = 0

    def call(self, *args: Any, **kwargs: Any) -> None:
        self.tell(self.value)

    def tell(self, done: int) -> None:
        """So many bytes of the file are over; fewer than before when it starts again."""
        more, self._told = done - self._told, done
        self._transfer.add(more)


def retried(work: Callable[[], T], delays: Sequence[float], what: str) -> T:
    """Do the work; where it fails, do it again after each of these delays, in seconds."""
    for delay in delays:
        try:
            return work()
        except (FileNotFoundError, PermissionError):  # which a second time would not change
            raise
        except OSError as error:
            logger.info("%s failed, next attempt in %g s: %s", what, delay, reason_of(error))
            time.sleep(delay)
    return work()


def reason_of(error: BaseException) -> str:
    """An error's first line: those of stores may have a hundred."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _bytes(count: int) -> str:
    size, units = float(count), iter(("B", "KB", "MB", "GB"))
    unit = next(units)
    while size >= 1000 and (larger := next(units, None)):
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


PROTOCOLS = ("http", "https")
SILENCE_S = 60.0
"""How long a server may say nothing."""
BLOCK = 1 << 20
MISSING = (404, 410)
MOST_BYTES_OF_A_PAGE = 64 * 2**20
MOST_LEVELS = 64
"""Folders in folders: a server may claim to have them without end."""


class HttpFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Files of a web server. A folder is a page of links, as web servers write it themselves."""

    protocol = PROTOCOLS

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path  # the whole URL names the file

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        try:
            with _answer(path, "HEAD") as answer:
                return _described(path, answer)
        except FileNotFoundError:
            raise
        except OSError:  # some allow GET alone, such as signed links
            with _answer(path, "GET", {"Range": "bytes=0-0"}) as answer:
                return _described(path, answer)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        with _answer(path, "GET") as answer:
            content = answer.read(MOST_BYTES_OF_A_PAGE + 1)
            base = answer.geturl()
        if len(content) > MOST_BYTES_OF_A_PAGE or urlsplit(base).path.count("/") > MOST_LEVELS:
            raise OSError(
                f"the listing {shown_url(base)} is refused: it may have {MOST_BYTES_OF_A_PAGE} "
                f"bytes, and {MOST_LEVELS} folders above it"
            )
        page = content.decode("utf-8", errors="replace")
        names = [f"{path.rstrip('/')}/{name}" for name in _children(base, page)]
        return [self.info(name) for name in names] if detail else names

    def find(self, path: str, *args: Any, **kwargs: Any) -> dict[str, dict[str, Any]]:
        """Every file below a folder. fsspec's own leaves out what cannot be listed."""
        found: dict[str, dict[str, Any]] = {}
        for info in self.ls(path):
            is_folder = info["type"] == "directory"
            found |= self.find(info["name"]) if is_folder else {info["name"]: info}
        return found

    def get_file(
        self, rpath: str, lpath: str, callback: Any = DEFAULT_CALLBACK, **kwargs: Any
    ) -> None:
        with _answer(rpath, "GET") as answer, Path(lpath).open("wb") as file:
            while block := answer.read(BLOCK):
                file.write(block)
                callback.relative_update(len(block))


@contextmanager
def _answer(url: str, method: str, headers: dict[str, str] | None = None) -> Iterator[HTTPResponse]:
    request = Request(url, headers=headers or {}, method=method)
    try:
        answer = urlopen(request, timeout=SILENCE_S)
    except HTTPError as error:
        error.close()
        if error.code in MISSING:
            raise FileNotFoundError(url) from error
        raise OSError(f"the server answered {error.code} {error.reason}") from error
    with answer:
        yield answer


def _described(url: str, answer: HTTPResponse) -> dict[str, Any]:
    """Servers redirect requests for a folder to its name with a slash at the end."""
    is_folder = urlsplit(answer.geturl()).path.endswith("/")
    whole = answer.headers.get("Content-Range", "").rpartition("/")[2]
    size = whole if answer.status == 206 else answer.headers.get("Content-Length", "")
    return {
        "name": url,
        "type": "directory" if is_folder else "file",
        "size": int(size) if size.isdigit() else None,
        "ETag": answer.headers.get("ETag"),
        "LastModified": answer.headers.get("Last-Modified"),
    }


def _children(base: str, page: str) -> list[str]:
    """The links of a page to what lies directly below it, as they are written in a URL."""
    found: dict[str, None] = {}
    for link in _links(page):
        below = urljoin(base, link).partition("#")[0].partition("?")[0].removeprefix(base)
        if below.count("/", 0, -1) == 0 and "://" not in below and below not in ("", "/"):
            found[below] = None
    return list(found)


def _links(page: str) -> list[str]:
    links: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            links.extend(
                value for name, value in attributes if (tag, name) == ("a", "href") and value
            )

    Links().feed(page)
    return links


CONTENT_MARKS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "checksum",
    "crc32c",
    "sha256",
    "blob_id",
)
"""The names in stores of a value that changes with a file's content."""
TIME_MARKS = ("mtime", "LastModified", "last_modified", "updated", "modificationTime", "created")
"""The names of the time of its last change, for want of such a value."""


@dataclass(frozen=True)
class StoredFile:
    name: str
    """Its path below the store's URL; empty if the URL names the file itself."""
    path: str
    """The name in the store."""
    size: int | None
    mark: str
    """Changes when the content does, as far as the store knows."""


class Store:
    """The place that a URL names. Names are paths below it, with slashes.

    A URL that cannot be used is a ConfigError that names the config key. Whatever goes wrong
    afterwards is an OSError, and may go well another time.
    """

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._key = key
        try:
            self._open()  # raises for a missing package now
        except OSError as error:
            raise ConfigError(f"{self.told}: {reason_of(error)}{self._hint()}") from error

    @property
    def told(self) -> str:
        """`key='url'`, for messages."""
        return f"{self._key}={shown_url(self.url)!r}"

    @property
    def name(self) -> str:
        """The last part of the URL; of one that is made of several, the last part of the first."""
        first = next(part for part in self.url.split("::") if "://" in part)
        last = unquote(first.partition("?")[0].rstrip("/").rpartition("/")[2])
        try:
            return check_name(last.replace("/", ""), "the URL")
        except OSError:
            return "files"

    @property
    def is_read_only(self) -> bool:
        return self._protocol in PROTOCOLS

    def files(self, name: str = "") -> list[StoredFile]:
        """Every file at or below the name."""
        with _as_os_error():
            system, path = self._open(name)
            system.invalidate_cache()
            info = system.info(path)
            if info["type"] != "directory":
                return [_stored("", path, info)]
            listed = system.find(path, detail=True)
            # An object store may keep an empty object in place of a folder.
            found = {file: each for file, each in listed.items() if not file.endswith("/")}
            if not found:
                raise FileNotFoundError(path)
            return self._listed(path, found)

    def folders(self) -> list[str]:
        """The names directly below the URL; none if there is nothing there."""
        with _as_os_error(), suppress(FileNotFoundError):
            system, path = self._open()
            system.invalidate_cache()
            children = [str(child).rstrip("/") for child in system.ls(path, False)]
            return [check_name(child.rpartition("/")[2], self._shown) for child in children]
        return []

    def exists(self, name: str) -> bool:
        with _as_os_error():
            system, path = self._open(name)
            system.invalidate_cache()
            return bool(system.exists(path))

    def get(self, file: StoredFile, target: Path, transfer: Transfer) -> None:
        """Copy a file here; it has come whole, or this raises."""
        counted = CountedFile(transfer)
        try:
            with _as_os_error():
                self._open()[0].get_file(file.path, str(target), callback=counted)
            came = target.stat().st_size
            if file.size is not None and came != file.size:
                name = file.name or self.name
                raise OSError(f"{came} bytes of {name} came, instead of {file.size}")
            counted.tell(came)
        except OSError:
            with suppress(OSError):  # of a transfer that was stopped
                counted.tell(0)
            raise

    def put(self, source: Path, name: str, transfer: Transfer) -> None:
        """Copy a file there, over one that there may be."""
        counted = CountedFile(transfer)
        try:
            self._put(source, name, counted)
            counted.tell(source.stat().st_size)
        except OSError:
            counted.tell(0)
            raise

    def read_text(self, name: str) -> str | None:
        """A small file's text; None if there is no such file."""
        with _as_os_error(), suppress(FileNotFoundError):
            system, path = self._open(name)
            return str(system.cat_file(path).decode())
        return None

    def write_text(self, name: str, text: str) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(text)
            file.flush()
            self._put(Path(file.name), name, CountedFile(Transfer(name, len(text))))

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if there is one."""
        with _as_os_error(), suppress(FileNotFoundError):
            system, path = self._open(name)
            system.invalidate_cache()
            system.rm(path, recursive=True)

    def _put(self, source: Path, name: str, counted: CountedFile) -> None:
        with _as_os_error():
            system, path = self._open(name)
            if not system.async_impl:  # those are object stores: they have no folders to make
                system.makedirs(path.rpartition("/")[0], exist_ok=True)
            system.put_file(str(source), path, callback=counted)

    @property
    def _protocol(self) -> str:
        return self.url.partition("://")[0]

    def _open(self, name: str = "") -> tuple[Any, str]:
        """(the file system, the path in it); fsspec keeps those that it made, one for a thread."""
        if self._protocol in PROTOCOLS:
            return HttpFiles(), self.url
        try:
            with _as_os_error(ImportError, ValueError):
                system, path = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{self.told}: {reason_of(error)}") from error
        return system, f"{path.rstrip('/')}/{name}" if name else path

    def _listed(self, root: str, found: dict[str, dict[str, Any]]) -> list[StoredFile]:
        """The store's listing below a path. The store may be run by anyone, and the
        names become paths of this machine: every listing goes through here."""
        files = []
        for path, info in found.items():
            name = path.removeprefix(root).lstrip("/")
            name = unquote(name) if self._protocol in PROTOCOLS else name
            if not path.startswith(root):
                raise OSError(f"{path} does not lie below {root}")
            self._check_link(name, info)
            files.append(_stored(name, path, info))
        check_names((file.name for file in files), self._shown)
        return files

    def _check_link(self, name: str, info: dict[str, Any]) -> None:
        """A link may name what lies beside it: nothing else of the machine that follows it."""
        if not (info.get("islink") or info.get("type") == "link" or info.get("linkname")):
            return
        target = info.get("destination") or info.get("linkname") or ".."
        target = target.decode(errors="replace") if isinstance(target, bytes) else str(target)
        below = normpath(f"{name.rpartition('/')[0] or '.'}/{target}")
        if target.startswith("/") or below.split("/")[0] == "..":
            told = f"{self._shown} has a link, {name!r}, to what is not in it: {target!r}"
            raise PermissionError(told)

    @property
    def _shown(self) -> str:
        return shown_url(self.url)

    def _hint(self) -> str:
        said = known_implementations.get(self._protocol, {}).get("err")
        return f" ({said})" if said else ""


@contextmanager
def _as_os_error(*kept: type[Exception]) -> Iterator[None]:
    """Stores raise the errors of their own libraries, which have no other base in common."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (OSError, *kept)):
            raise
        raise OSError(f"{type(error).__name__}: {reason_of(error)}") from error


def _stored(name: str, path: str, info: dict[str, Any]) -> StoredFile:
    marks = (*CONTENT_MARKS, *TIME_MARKS)
    mark = next((f"{m} {info[m]}" for m in marks if info.get(m) is not None), "")
    return StoredFile(name, path, info.get("size"), mark)
