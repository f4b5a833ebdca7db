"""Files behind http:// and https://, to be read with Python's own library.

fsspec's file system for them needs aiohttp, which nothing else here does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urljoin, urlsplit
from urllib.request import Request, urlopen

from fsspec import AbstractFileSystem
from fsspec.callbacks import DEFAULT_CALLBACK

from caldera.storage.paths import shown_url

PROTOCOLS = ("http", "https")
SILENCE_S = 60.0
"""How long a server may say nothing."""
BLOCK = 1 << 20
MISSING = (404, 410)
MOST_BYTES_OF_A_PAGE = 64 * 2**20
MOST_LEVELS = 64
"""Folders in folders: a server may claim to have them without end."""


class HttpFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """What a web server holds. A folder is a page of links, as web servers write it themselves."""

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
    """Servers send whoever asks for a folder to its name with a slash at the end."""
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
