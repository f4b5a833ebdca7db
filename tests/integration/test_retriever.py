"""`caldera retriever`: an index is built and served by the command line, and asked by clients."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from caldera.errors import ConfigError
from caldera.search_agent.retriever import (
    BuildOptions,
    Hit,
    Index,
    RetrieverServer,
    build_index,
)
from caldera.tools.search import Document, RetrieverClient

pytest.importorskip("bm25s")

CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi"}


def passage(country: str) -> dict[str, str]:
    text = f"The capital of {country} is {CAPITALS[country]}."
    return {"id": country, "contents": f'"{country}"\n{text}'}


def write(path: Path, *countries: str) -> Path:
    path.write_text("".join(json.dumps(passage(country)) + "\n" for country in countries))
    return path


def caldera(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "caldera.cli", "retriever", *map(str, arguments)]
    return subprocess.run(command, text=True, capture_output=True, timeout=120)


@contextmanager
def served(index: Path, *options: str) -> Iterator[str]:
    """The address of a service in a process of its own."""
    command = [sys.executable, "-m", "caldera.cli", "retriever", "serve", "--index", str(index)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*command, "--port", "0", *options], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = re.match(r"(http://\S+/retrieve): \d+ passages, searched by", line)
            assert match, line
            yield match[1]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("retriever")
    corpus = write(folder / "corpus.jsonl", *CAPITALS)
    build_index([corpus], folder / "index", BuildOptions())
    return folder / "index"


def test_the_command_builds_and_adds(tmp_path: Path) -> None:
    first = write(tmp_path / "first.jsonl", "France", "Italy")
    second = write(tmp_path / "second.jsonl", "Japan", "Kenya")
    built = caldera("build", "--corpus", first, "--index", tmp_path / "index")
    assert built.returncode == 0, built.stderr
    assert "2 passages, searched by bm25" in built.stdout
    added = caldera("build", "--corpus", second, "--index", tmp_path / "index", "--add")
    assert "4 passages, searched by bm25" in added.stdout
    again = caldera("build", "--corpus", first, "--index", tmp_path / "index")
    assert again.returncode == 2
    assert "exists already; --add adds passages to it" in again.stderr


def test_a_service_answers_in_the_format_of_search_r1(index: Path) -> None:
    with served(index, "--topk", "2") as url, httpx2.Client() as client:
        request = {"queries": ["capital of Kenya", "Tokyo"], "topk": 1, "return_scores": True}
        answered = client.post(url, json=request).json()["result"]
        assert [[hit["document"] for hit in hits] for hits in answered] == [
            [passage("Kenya")],
            [passage("Japan")],
        ]
        assert answered[0][0]["score"] > 0
        plain = client.post(url, json={"queries": ["capital of Kenya"]}).json()["result"]
        assert plain[0][0] == passage("Kenya")
        assert len(plain[0]) == 2, "as many as --topk says"
        health = client.get(url.replace("/retrieve", "/health")).json()
        assert (health["method"], health["passages"]) == ("bm25", 4)
        for body, said in (
            ({"queries": "capital"}, "'queries' must be a list"),
            ({"queries": ["a"], "topk": 0}, "'topk' must be a whole number"),
            ([], "must be a JSON object"),
        ):
            refused = client.post(url, json=body)
            assert refused.status_code == 422
            assert said in refused.json()["detail"]
        assert client.post(url.replace("/retrieve", "/search"), json={}).status_code == 404
        for content in (b"no JSON", b"[" * 100_000):
            assert client.post(url, content=content).status_code == 422


def ask(url: str, queries: list[str], topk: int) -> tuple[int, str]:
    answered = httpx2.post(url, json={"queries": queries, "topk": topk})
    return answered.status_code, answered.text


@contextmanager
def serving(server: RetrieverServer) -> Iterator[str]:
    with server:
        yield server.url


def test_a_request_for_too_many_passages_is_refused(index: Path) -> None:
    with serving(RetrieverServer(Index(index), "127.0.0.1", 0)) as url:
        status, told = ask(url, ["capital"] * 1000, 1000)
        assert status == 422
        assert "1000 queries with topk=1000 ask for 1000000 passages" in told
        assert "a request may ask for 32768 (--max-passages)" in told
        assert ask(url, [f"capital of {n}" for n in range(512)], 10)[0] == 200
    with serving(RetrieverServer(Index(index), "127.0.0.1", 0, max_passages=3)) as url:
        assert ask(url, ["capital"], 3)[0] == 200
        assert ask(url, ["capital"], 4)[0] == 422
    with pytest.raises(ConfigError, match=r"--max-passages=2 must be at least --topk=3"):
        RetrieverServer(Index(index), "127.0.0.1", 0, max_passages=2)
    with pytest.raises(ConfigError, match=r"--max-answer-mb=0 must be at least 1"):
        RetrieverServer(Index(index), "127.0.0.1", 0, max_answer_mb=0)


def test_an_answer_that_is_too_large_is_refused(tmp_path: Path) -> None:
    row = {"id": "1", "contents": "Rome " + "x" * 600_000}
    (tmp_path / "corpus").write_text(f"{json.dumps(row)}\n")
    build_index([tmp_path / "corpus"], tmp_path / "index", BuildOptions())
    server = RetrieverServer(Index(tmp_path / "index"), "127.0.0.1", 0, max_answer_mb=1)
    with serving(server) as url:
        assert ask(url, ["Rome"], 1)[0] == 200
        status, told = ask(url, ["Rome", "Rome"], 1)
        assert status == 422
        assert "have 1200010 characters: an answer may have 1048576 (--max-answer-mb)" in told


def test_a_search_that_fails_is_no_fault_of_the_request(index: Path) -> None:
    class Broken(Index):
        def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
            raise ValueError("the disk is gone")

    with RetrieverServer(Broken(index), "127.0.0.1", 0) as server:
        answered = httpx2.post(server.url, json={"queries": ["Tokyo"]})
    assert answered.status_code == 500, "clients ask again"
    assert "the disk is gone" in answered.json()["detail"]


def test_a_client_that_goes_away_is_not_reported(
    index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RetrieverServer(Index(index), "127.0.0.1", 0) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as gone:
            reset = struct.pack("ii", 1, 0)  # closing sends a reset
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            gone.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
            time.sleep(0.1)  # the service waits for the rest
        assert httpx2.post(server.url, json={"queries": ["Tokyo"]}).status_code == 200
    assert "Traceback" not in capsys.readouterr().err


def test_many_clients_get_their_own_answers(index: Path) -> None:
    async def ask(url: str) -> list[list[list[Document]]]:
        client = RetrieverClient(url, topk=1)
        queries = [f"capital of {country}, question {n}" for n in range(16) for country in CAPITALS]
        try:
            return await asyncio.gather(*(client.search([query]) for query in queries))
        finally:
            await client.close()

    with served(index) as url:
        answers = asyncio.run(ask(url))
    assert [answer[0][0].title for answer in answers] == list(CAPITALS) * 16
