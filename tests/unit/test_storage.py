"""URLs in the place of paths: what is fetched, when, and what is said when it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.registry import known_implementations

from caldera.data import hf_tokenizer, load_object, read_rows
from caldera.errors import ConfigError, DataError
from caldera.storage import below_url, cache_folder, fetching, local_path, shown_url
from caldera.storage.fetching import fetch
from caldera.storage.store import Store, Transfer, _children, retried

KEY = "data.train_files"


class Site:
    """A web server of this machine, and what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: Counter[str] = Counter()
        self.before_get: Callable[[str], None] = lambda path: None
        self.cut: dict[str, int] = {}
        """Paths of which this many answers end too early."""
        self.heads_refused = False
        site = self

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args, directory=str(folder))

            def do_GET(self) -> None:
                site.asked[self.path] += 1
                site.before_get(self.path)
                if self.headers.get("Range"):
                    self._send_first_byte()
                elif site.cut.get(self.path, 0) > 0:
                    site.cut[self.path] -= 1
                    self._send_half()
                else:
                    super().do_GET()

            def do_HEAD(self) -> None:
                if site.heads_refused:
                    self.send_error(403)
                else:
                    super().do_HEAD()

            def _send_half(self) -> None:
                content = Path(self.translate_path(self.path)).read_bytes()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True

            def _send_first_byte(self) -> None:
                content = Path(self.translate_path(self.path)).read_bytes()
                self.send_response(206)
                self.send_header("Content-Range", f"bytes 0-0/{len(content)}")
                self.send_header("Content-Length", "1")
                self.send_header("ETag", '"1"')
                self.end_headers()
                self.wfile.write(content[:1])

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,)).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "site").mkdir()
    site = Site(tmp_path / "site")
    yield site
    site.close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CALDERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fetching, "DELAYS", (0.0, 0.0))
    return tmp_path / "cache"


def write(file: Path, text: str, age_s: float = 0.0) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    os.utime(file, (file.stat().st_atime, file.stat().st_mtime - age_s))
    return file


def files_below(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


# ---------------------------------------------------------------------- paths


@pytest.mark.parametrize("path", ["/x/y.parquet", "~/y", "y.json", "Qwen/Qwen3-8B", ""])
def test_plain_paths_and_hub_names_stay_as_they_are(path: str) -> None:
    assert local_path(path, KEY) == path


def test_plain_paths_cost_nothing() -> None:
    code = (
        "import sys; from caldera.storage import local_path; local_path('/x', 'k'); "
        "print('fsspec' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_file_url_is_a_path() -> None:
    assert local_path("file:///x/y.parquet", KEY) == "/x/y.parquet"


def test_the_cache_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == cache
    monkeypatch.delenv("CALDERA_CACHE")
    assert cache_folder() == Path.home() / ".cache/caldera"


def test_messages_hold_no_secrets() -> None:
    assert shown_url("sftp://me:secret@host/x") == "sftp://***@host/x"
    assert shown_url("https://host/x.json?signature=secret") == "https://host/x.json"
    assert shown_url("hdfs://me@host:8020/a@b") == "hdfs://***@host:8020/a@b"


def test_urls_below_a_url() -> None:
    assert below_url("s3://b/run/", "x") == "s3://b/run/x"
    assert below_url("hdfs://h/run?replication=2", "x") == "hdfs://h/run/x?replication=2"


# ---------------------------------------------------------------------- fetching


def test_a_file_is_fetched_once_until_it_changes(site: Site) -> None:
    source = write(site.folder / "a.txt", "old", age_s=100)
    url, cache = f"{site.url}/a.txt", cache_folder()
    first = fetch(url, KEY, cache)
    assert (first.name, first.read_text()) == ("a.txt", "old")
    assert fetch(url, KEY, cache) == first
    assert site.asked["/a.txt"] == 1
    source.write_text("new")  # as long as before: its time tells
    second = fetch(url, KEY, cache)
    assert second.read_text() == "new"
    assert site.asked["/a.txt"] == 2
    assert first.read_text() == "old"  # whoever reads the older version can go on


def test_a_process_sees_one_version(site: Site) -> None:
    source = write(site.folder / "a.txt", "old", age_s=100)
    path = local_path(f"{site.url}/a.txt", KEY)
    source.write_text("new")
    assert local_path(f"{site.url}/a.txt", KEY) == path
    assert Path(path).read_text() == "old"


def test_a_folder_is_fetched_whole(site: Site) -> None:
    content = {"a.json": "1", "sub/b c.txt": "22", "sub/deep/d.bin": "333", "w.safetensors": "4"}
    for name, text in content.items():
        write(site.folder / "model" / name, text)
    for url in (f"{site.url}/model", f"{site.url}/model/"):
        folder = fetch(url, KEY, cache_folder())
        assert folder.name == "model"
        assert files_below(folder) == content


def test_files_that_are_not_needed_are_left_out(site: Site) -> None:
    for name in ("config.json", "model.safetensors"):
        write(site.folder / "model" / name, name)
    small = local_path(f"{site.url}/model", KEY, skip=(".safetensors",))
    assert list(files_below(Path(small))) == ["config.json"]
    assert site.asked["/model/model.safetensors"] == 0
    whole = local_path(f"{site.url}/model", KEY)
    assert sorted(files_below(Path(whole))) == ["config.json", "model.safetensors"]
    assert local_path(f"{site.url}/model", KEY, skip=(".safetensors",)) == whole


def test_an_interrupted_fetch_goes_on(site: Site) -> None:
    for name in ("a", "b"):
        write(site.folder / "m" / name, f"content of {name}")
    site.cut["/m/b"] = 3  # as many as there are attempts
    with pytest.raises(ConfigError) as raised:
        fetch(f"{site.url}/m", KEY, cache_folder())
    assert str(raised.value) == (
        f"{KEY}='{site.url}/m': cannot be fetched into {cache_folder()}: "
        "6 bytes of b came, instead of 12"
    )
    assert not list(cache_folder().rglob("b"))
    folder = fetch(f"{site.url}/m", KEY, cache_folder())
    assert files_below(folder) == {"a": "content of a", "b": "content of b"}
    assert site.asked["/m/a"] == 1


def test_a_dropped_connection_is_tried_again(site: Site) -> None:
    write(site.folder / "a.txt", "0123456789")
    site.cut["/a.txt"] = 2
    assert fetch(f"{site.url}/a.txt", KEY, cache_folder()).read_text() == "0123456789"
    assert site.asked["/a.txt"] == 3


def test_several_processes_fetch_once(site: Site, cache: Path) -> None:
    write(site.folder / "a.txt", "x" * 1000)
    code = (
        "import sys; from caldera.storage import local_path; "
        f"print(open(local_path({site.url + '/a.txt'!r}, 'key')).read() == 'x' * 1000)"
    )
    site.before_get = lambda path: time.sleep(0.3)  # long enough for the others to come
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate()[0] for process in processes] == ["True\n"] * 3
    assert site.asked["/a.txt"] == 1


def test_versions_that_nobody_uses_are_removed(site: Site) -> None:
    source = write(site.folder / "a.txt", "old", age_s=100)
    first = fetch(f"{site.url}/a.txt", KEY, cache_folder())
    long_ago = first.stat().st_mtime - fetching.UNUSED_S - 1
    os.utime(first.parent, (long_ago, long_ago))
    source.write_text("new")
    second = fetch(f"{site.url}/a.txt", KEY, cache_folder())
    assert not first.exists() and second.exists()


def test_servers_that_allow_get_alone(site: Site) -> None:
    site.heads_refused = True
    write(site.folder / "a.txt", "signed")
    assert fetch(f"{site.url}/a.txt?signature=1", KEY, cache_folder()).name == "a.txt"
    [file] = Store(f"{site.url}/a.txt", KEY).files()
    assert file.size == len("signed")


def test_pages_of_links() -> None:
    base = "http://h/m/"
    page = """<a href="../">up</a> <a href="?C=N;O=D">sort</a> <a href="a%20b.txt">a</a>
      <a href="/m/sub/">s</a> <a href="/m/sub/c">c</a> <a href="http://other/x">o</a>
      <a href="/else">e</a> <A HREF='d'>d</A> <a name="x">n</a> <a href="d#part">d again</a>"""
    assert _children(base, page) == ["a%20b.txt", "sub/", "d"]


def test_memory_and_other_stores(cache: Path) -> None:
    store = Store("memory://bucket/run", KEY)
    source = write(cache / "source.txt", "text")
    store.put(source, "sub/a.txt", Transfer("put", 4))
    store.write_text("tracker", "7")
    assert store.read_text("tracker") == "7"
    assert store.read_text("nothing") is None
    assert sorted(store.folders()) == ["sub", "tracker"]
    assert files_below(fetch("memory://bucket/run", KEY, cache)) == {
        "sub/a.txt": "text",
        "tracker": "7",
    }
    store.remove("sub")
    store.remove("sub")
    assert not store.exists("sub") and store.exists("tracker")
    store.remove("tracker")
    assert Store("memory://nowhere", KEY).folders() == []


# ---------------------------------------------------------------------- what reads files


def test_data_files(site: Site) -> None:
    write(site.folder / "train.jsonl", '{"x": 1}\n{"x": 2}\n')
    url = f"{site.url}/train.jsonl"
    table = read_rows(url, key=KEY)
    assert table.rows == [{"x": 1}, {"x": 2}]
    assert table.where(1) == f"row 1 of {url}"
    with pytest.raises(DataError, match=f"^data.prompt_key='prompt': {url} has no such column"):
        read_rows(url, key=KEY, required={"prompt": "data.prompt_key"})


def test_a_model_and_its_tokenizer(site: Site, model_folder: Callable[..., str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    (site.folder / "tiny").symlink_to(model_folder())
    tokenizer = hf_tokenizer(f"{site.url}/tiny")
    assert tokenizer("AB").input_ids == hf_tokenizer(model_folder()).encode("AB")
    assert site.asked["/tiny/model.safetensors"] == 0
    model = AutoModelForCausalLM.from_pretrained(local_path(f"{site.url}/tiny", KEY))
    expected = AutoModelForCausalLM.from_pretrained(model_folder()).state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_score_function(site: Site) -> None:
    write(site.folder / "score.py", "def compute_score(): return 3")
    function = load_object(f"{site.url}/score.py", "compute_score", "custom_reward_function")
    assert function() == 3


# ---------------------------------------------------------------------- mistakes


def test_a_missing_file(site: Site) -> None:
    with pytest.raises(ConfigError) as raised:
        read_rows(f"{site.url}/a.parquet?token=secret", key=KEY)
    said = f"{KEY}='{site.url}/a.parquet': there is no such file or folder"
    assert str(raised.value) == said


def test_a_server_that_is_gone(site: Site) -> None:
    site.close()
    with pytest.raises(ConfigError, match=r"^data.train_files='http://.*': cannot be fetched .*re"):
        local_path(f"{site.url}/a.parquet", KEY)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"class": "no_such_package.Files", "err": "Install no-such-package to access it"}
    monkeypatch.setitem(known_implementations, "nothere", entry)
    with pytest.raises(ConfigError) as raised:
        local_path("nothere://bucket/a.parquet", KEY)
    said = f"{KEY}='nothere://bucket/a.parquet': Install no-such-package to access it"
    assert str(raised.value) == said


def test_a_store_that_cannot_be_opened_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(fsspec.AbstractFileSystem):
        protocol = "broken"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("Unable to load libjvm\nand a hundred lines")

    monkeypatch.setitem(known_implementations, "broken", {"err": "Java is required"})
    fsspec.register_implementation("broken", Broken, clobber=True)
    with pytest.raises(ConfigError) as raised:
        Store("broken://host/x", KEY)
    assert str(raised.value) == f"{KEY}='broken://host/x': Unable to load libjvm (Java is required)"


def test_an_unknown_protocol() -> None:
    with pytest.raises(ConfigError, match=r"^data.train_files='s4://b/x': Protocol not known: s4$"):
        local_path("s4://b/x", KEY)


# ---------------------------------------------------------------------- transfers


def test_the_line_of_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("caldera.storage.fetching.time.monotonic", lambda: now)
    transfer = Transfer("fetching s3://b/model", 10_000_000_000)
    assert transfer.line() == "fetching s3://b/model: 0 B"
    now = 160.0
    transfer.add(2_500_000_000)
    assert transfer.line() == "fetching s3://b/model: 2.5 GB of 10.0 GB, ETA 0:03:00"


def test_a_long_transfer_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "caldera")
    quick, slow = Transfer("quick", 2), Transfer("slow", 2, seconds_between_lines=0.0)
    for transfer in (quick, slow):
        transfer.add(1)
        transfer.end()
    assert [message.partition(":")[0] for message in caplog.messages] == ["slow", "slow"]


def test_what_is_tried_again() -> None:
    attempts: list[int] = []

    def fail(error: OSError) -> Callable[[], None]:
        def work() -> None:
            attempts.append(1)
            raise error

        return work

    for error, expected in ((OSError("busy"), 3), (FileNotFoundError(), 1), (PermissionError(), 1)):
        attempts.clear()
        with pytest.raises(type(error)):
            retried(fail(error), (0.0, 0.0), "asking")
        assert len(attempts) == expected
