"""Names that a store sends never become paths outside the cache."""

from __future__ import annotations

import io
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from caldera.errors import ConfigError
from caldera.storage import fetching
from caldera.storage.fetching import fetch
from caldera.storage.paths import check_name, check_names
from caldera.storage.store import Store

KEY = "actor_rollout_ref.model.path"
HOSTILE = [
    "/etc/x", "//etc/x", "../x", "a/../../x", "..", ".", "", "a//b", "a/./b", "a/..", "a\\b",
    "..\\x", "C:\\x", "c:x", "C:/x", "\\\\host\\share", "a\0b", "a\nb", "%2fabs", "%252fabs",
    "%25252e%25252e/x", "%2e%2e/x", "..%2fx", "..%5cx", "a%00b", "\uff0e\uff0e/x", "\uff0fetc",
    "a\ud800b", "%43%3ax",
]  # fmt: skip
HARMLESS = [
    "config.json", "sub/b c.txt", ".gitattributes", "a..b", "...", "100%.txt", "a%20b", "ab:c",
    "Größe.txt", "模型/权重.safetensors", "model-00001-of-00002.safetensors", "~x", "a+b=c",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "DELAYS", (0.0, 0.0))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_may_leave_its_folder_is_refused(name: str) -> None:
    with pytest.raises(PermissionError, match="refused"):
        check_name(name, "s3://b")


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_name_stays_as_it_is(name: str) -> None:
    assert check_name(name, "s3://b") == name


@pytest.mark.parametrize(
    "names", [["a", "a"], ["e\u0301", "\u00e9"], ["a", "a/b"], ["a/b/c", "a/b"]]
)
def test_names_for_one_place_are_refused(names: list[str]) -> None:
    with pytest.raises(PermissionError):
        check_names(names, "s3://b")


@contextmanager
def site(links: Sequence[str]) -> Iterator[str]:
    """A web server whose folder has these links, with something behind whatever is asked for."""
    page = "".join(f'<a href="{link}">x</a>' for link in links).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page if self.path.endswith("/") else b"evil"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/m/"
    finally:
        server.shutdown()
        server.server_close()


def written(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()} - {".lock"}


@pytest.mark.parametrize("levels", [1, 2])
def test_a_web_server_writes_nothing_outside_the_cache(tmp_path: Path, levels: int) -> None:
    victim = tmp_path / "victim"
    quoted = str(victim).replace("/", "%2f")
    for _ in range(levels - 1):
        quoted = quoted.replace("%", "%25")
    hostile = [quoted, "..%2f..%2f..%2fvictim", "%2e%2e%2fvictim", "a%5c..%5cb", "a%00b", "C:%5cx"]
    for link in hostile:
        with site(["good.json", link]) as url, pytest.raises(ConfigError) as raised:
            fetch(url, KEY, tmp_path / "cache")
        assert str(raised.value).startswith(f"{KEY}=") and "refused" in str(raised.value)
    assert not victim.exists()
    assert written(tmp_path) == set()


def test_a_web_server_with_two_spellings_of_a_name_is_refused(tmp_path: Path) -> None:
    with site(["good", "%67ood"]) as url, pytest.raises(ConfigError, match="two files for one"):
        fetch(url, KEY, tmp_path / "cache")


def test_a_web_server_with_folders_without_end_is_refused(tmp_path: Path) -> None:
    with site(["sub/"]) as url, pytest.raises(ConfigError, match="folders above it"):
        fetch(url, KEY, tmp_path / "cache")


def test_a_url_names_no_place_outside_the_cache(tmp_path: Path) -> None:
    victim = str(tmp_path / "victim").replace("/", "%2f")
    with site([]) as url:
        copy = fetch(f"{url}{victim}", KEY, tmp_path / "cache")
    assert copy.read_text() == "evil" and copy.is_relative_to(tmp_path / "cache")
    assert not (tmp_path / "victim").exists()


class Objects(MemoryFileSystem):
    """A store of objects, whose keys are any text, such as S3's."""

    protocol = ("objects", "hdfslike")
    names: Sequence[str] = ()
    extra: Mapping[str, Any] = MappingProxyType({})

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return {"name": path, "type": "directory", "size": 0}

    def find(self, path: str, **kwargs: Any) -> dict[str, dict[str, Any]]:
        entry = {"type": "file", "size": 4, **self.extra}
        return {f"{path}/{name}": entry for name in self.names}

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        return [f"{path}/{name}" for name in self.names]

    def get_file(self, rpath: str, lpath: str, **kwargs: Any) -> None:
        Path(lpath).write_text("evil")


@pytest.mark.parametrize("protocol", ["objects", "hdfslike"])
@pytest.mark.parametrize("name", [name for name in HOSTILE if name.strip("/") == name and name])
def test_a_store_of_objects_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str, name: str
) -> None:
    fsspec.register_implementation(protocol, Objects, clobber=True)
    monkeypatch.setattr(Objects, "names", ["good.json", name])
    with pytest.raises(ConfigError, match="refused"):
        fetch(f"{protocol}://bucket/m", KEY, tmp_path)
    assert written(tmp_path) == set()
    monkeypatch.setattr(Objects, "names", ["x/.."])
    with pytest.raises(OSError, match="refused"):
        Store(f"{protocol}://bucket/m", KEY).folders()


def test_marks_of_folders_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("objects", Objects, clobber=True)
    monkeypatch.setattr(Objects, "names", ["sub/", "sub/a"])
    assert (fetch("objects://bucket/m", KEY, tmp_path) / "sub/a").read_text() == "evil"


@pytest.mark.parametrize("extra", [{"type": "link"}, {"islink": True, "destination": "/etc/x"}])
def test_links_of_a_store_to_elsewhere_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]
) -> None:
    fsspec.register_implementation("objects", Objects, clobber=True)
    monkeypatch.setattr(Objects, "names", ["a"])
    monkeypatch.setattr(Objects, "extra", extra)
    with pytest.raises(ConfigError, match="has a link"):
        fetch("objects://bucket/m", KEY, tmp_path)


def test_links_of_a_local_store_stay_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "real").write_text("content")
    (folder / "beside").symlink_to("real")
    copy = fetch(f"local://{folder}", KEY, tmp_path / "cache")
    assert (copy / "beside").read_text() == "content" and not (copy / "beside").is_symlink()
    (tmp_path / "private").write_text("private")
    (folder / "outside").symlink_to("../private")
    with pytest.raises(ConfigError, match=r"has a link, 'outside', .*: '../private'$"):
        fetch(f"local://{folder}", KEY, tmp_path / "cache")


@pytest.mark.parametrize("name", ["../victim", "a/../../victim", "a\\..\\victim"])
def test_an_archive_writes_nothing_outside_the_cache(tmp_path: Path, name: str) -> None:
    archive = tmp_path / "m.tar"
    with tarfile.open(archive, "w") as tar:
        for member in ("good", name):
            entry = tarfile.TarInfo(member)
            entry.size = 4
            tar.addfile(entry, io.BytesIO(b"evil"))
    with pytest.raises(ConfigError, match="refused"):
        fetch(f"tar://::file://{archive}", KEY, tmp_path / "cache")
    assert written(tmp_path) == {"m.tar"}


def test_a_link_in_an_archive_to_elsewhere_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "m.tar"
    with tarfile.open(archive, "w") as tar:
        entry = tarfile.TarInfo("link")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(entry)
    with pytest.raises(ConfigError, match="has a link"):
        fetch(f"tar://::file://{archive}", KEY, tmp_path / "cache")
    assert written(tmp_path) == {"m.tar"}
