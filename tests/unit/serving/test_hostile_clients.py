"""Every server that listens, against clients that send what they like, as slowly as they like."""

from __future__ import annotations

import copy
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from caldera import web
from caldera.sandbox import Limits, Sandbox
from caldera.sandbox.server import SandboxServer
from caldera.search_agent.retriever import BuildOptions, Index, RetrieverServer, build_index
from caldera.web import HttpServer, Reply, Request
from caldera.workers.reward_router import Router
from caldera.workers.reward_server import RewardServer, ServedModel

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
OPTIONS = {
    **{name: 1 for name in ("temperature", "top_p", "min_p", "repetition_penalty", "n", "top_k")},
    **{name: 0 for name in ("presence_penalty", "frequency_penalty", "seed")},
    "stop": "x", "stop_token_ids": [1], "ignore_eos": False, "logprobs": None, "model": "tiny",
    "session_id": "a", "stream": False, "stream_options": None, "return_token_ids": False,
    "user": "u",
}  # fmt: skip
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        CHAT | OPTIONS | {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "tool_choice": "auto", "parallel_tool_calls": True, "chat_template_kwargs": {},
            "max_completion_tokens": 1, "top_logprobs": None,
        },
    ),
    "text": ("/v1/completions", {"prompt": "hi", "max_tokens": 1} | OPTIONS),
    "classify": (
        "/classify", {"input": "hi", "model": "tiny", "activation": False, "encoding_format": None},
    ),
    "router": ("/v1/embeddings", {"input": ["hi"], "encoding_format": "float"}),
    "retriever": ("/retrieve", {"queries": ["Rome"], "topk": 1, "return_scores": True}),
    "run": (
        "/run_code",
        {
            "code": "", "language": "python", "stdin": "", "run_timeout": 5, "memory_limit_MB": 256,
            "files": {"a": "YQ=="}, "fetch_files": [],
        },
    ),
    "check": ("/check", {"code": "", "tests": "", "run_timeout": 5, "memory_limit_MB": 256}),
}  # fmt: skip
DEEP = 100_000
BAD_BODIES: dict[str, bytes] = {
    "empty": b"",
    "null": b"null",
    "a number": b"1",
    "a text": b'"text"',
    "a list": b"[]",
    "no JSON": b"{",
    "two": b"{}{}",
    "deep lists": b"[" * DEEP,
    "deep lists that end": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "not UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "zero bytes": b"\0" * 100,
}
BAD_VALUES: dict[str, bytes] = {
    "NaN": b"NaN",
    "Infinity": b"Infinity",
    "-Infinity": b"-Infinity",
    "1e999": b"1e999",
    "10,000 digits": b"9" * 10_000,
    "half a character": b'"\\ud800"',
    "101 lists": b"[" * 101 + b"]" * 101,
    "900 lists": b"[" * 900 + b"]" * 900,
}
ODD_VALUES: list[Any] = [
    None, True, -1, 10**400, 1.5, 1e308, "", "a\0b", "x" * 5000, "é", [], [None], [[]], ["a", 1],
    [-1], [10**30], {}, {"": None}, {"a": []}, {"/": "YQ=="}, {"../a": "YQ=="}, {"a" * 300: "YQ=="},
    {"a\0": "YQ=="}, [{}], [{"role": 5, "content": 5}], [{"role": "user", "content": {}}],
    [{"role": "user", "content": [{"type": "text", "text": 1}]}], [{"role": "user"}],
    [{"role": "assistant", "content": None, "tool_calls": 5}], [{"type": "function"}],
    [{"type": "function", "function": {"name": "f", "parameters": 7}}], ["x", ["y"]],
]  # fmt: skip
STREAMS = ODD_VALUES.index(True)
"""With this value the answer is no JSON."""


@dataclass(frozen=True)
class Service:
    """A server, and a request that it answers."""

    address: tuple[str, int]
    path: str
    body: dict[str, Any]

    def post(self, body: bytes) -> tuple[int, Any]:
        """(status, answer); raises if there is none."""
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        try:
            connection.request("POST", self.path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def send(self, content: bytes) -> bytes:
        """What comes back until the server closes."""
        with socket.create_connection(self.address, timeout=60) as client:
            client.sendall(content)
            return read_all(client)

    def head(self, *lines: str) -> bytes:
        return "\r\n".join([f"POST {self.path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def read_all(client: socket.socket) -> bytes:
    with client.makefile("rb") as reply:
        return reply.read()


def read_reply(client: socket.socket, start: bytes = b"") -> bytes:
    """One answer, whole, on a connection that may stay open; `start` of it was read before."""
    reply = start
    while True:
        head, blank, body = reply.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        if blank and length and len(body) >= int(length[1]):
            return reply
        more = client.recv(2**16)
        if not more:
            return reply
        reply += more


def parts(address: str) -> tuple[str, int]:
    host, port = address.split(":")
    return host, int(port)


@pytest.fixture(scope="module")
def services(served: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Service]]:
    pytest.importorskip("bm25s")
    folder = tmp_path_factory.mktemp("retriever")
    (folder / "corpus").write_text('{"id": "1", "contents": "Rome is a city"}\n')
    build_index([folder / "corpus"], folder / "index", BuildOptions())
    with ExitStack() as stack:
        chat = parts(served.server.address)
        reward = RewardServer(
            lambda sequences: [0.0] * len(sequences),
            ServedModel("tiny", served.tokenizer, len(served.tokenizer), 768), 768, 8,
            "127.0.0.1",
        )  # fmt: skip
        stack.callback(reward.close)
        router = Router("127.0.0.1", [reward.address])
        stack.callback(router.close)
        retriever = stack.enter_context(RetrieverServer(Index(folder / "index"), "127.0.0.1", 0))
        sandbox = stack.enter_context(
            Sandbox(Limits(wall_seconds=20, memory_mb=256), slots=1, allow_unsafe=True)
        )
        run = parts(stack.enter_context(SandboxServer(sandbox, "127.0.0.1", 0)).address)
        addresses = {
            "chat": chat, "text": chat, "classify": parts(reward.address),
            "router": parts(router.address), "retriever": parts(retriever.address),
            "run": run, "check": run,
        }  # fmt: skip
        yield {name: Service(addresses[name], *REQUESTS[name]) for name in REQUESTS}


@pytest.fixture(params=list(REQUESTS))
def service(request: pytest.FixtureRequest, services: dict[str, Service]) -> Service:
    return services[request.param]


ONE_OF_EACH_KIND = pytest.mark.parametrize("service", ["chat", "retriever", "run"], indirect=True)


def said(answer: Any) -> str:
    """The message of a refusal."""
    return str(answer["detail"] if "detail" in answer else answer["error"]["message"])


def plain(service: Service) -> bytes:
    return json.dumps(
        {key: each for key, each in service.body.items() if each is not None}
    ).encode()


def test_the_requests_of_this_file_are_answered(service: Service) -> None:
    status, answer = service.post(plain(service))
    assert status == 200, answer


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_body_that_is_no_request_is_refused(service: Service, name: str) -> None:
    status, answer = service.post(BAD_BODIES[name])
    assert 400 <= status < 500
    assert said(answer)


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values_that_json_does_not_have_are_refused(service: Service, name: str) -> None:
    for field in service.body:
        fields = [f'"{key}": {json.dumps(each)}' for key, each in service.body.items()]
        bad = f'"{field}": '.encode() + BAD_VALUES[name]
        status, answer = service.post(b"{" + b", ".join([*map(str.encode, fields), bad]) + b"}")
        assert 400 <= status < 500, field
        assert said(answer)


@pytest.mark.parametrize("place", range(len(ODD_VALUES)))
def test_no_value_of_a_field_is_a_fault_of_the_server(service: Service, place: int) -> None:
    fields = [each for each in service.body if (each, place) != ("stream", STREAMS)]
    for field in fields:
        body = copy.deepcopy(service.body) | {field: ODD_VALUES[place]}
        status, answer = service.post(json.dumps(body).encode())
        assert status < 500, f"{field}={ODD_VALUES[place]!r:.60}: {answer}"
        if status != 200:
            assert said(answer)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["Content-Length: -1"], 400),
        (["Content-Length: 1e3"], 400),
        (["Content-Length: \u00b2"], 400),
        (["Content-Length: " + "9" * 10_000], 400),
        (["Content-Length: 2", "Content-Length: 3"], 400),
        (["Content-Length: 999999999999"], 413),
        (["Content-Length: 10", "Expect: 100-continue"], 400),
        ([f"X-{n}: a" for n in range(20_000)], 400),
        (["X-Long: " + "a" * 2**17], 400),
    ],
)
@ONE_OF_EACH_KIND
def test_a_length_that_cannot_be_right_is_refused(
    service: Service, headers: list[str], status: int
) -> None:
    with socket.create_connection(service.address, timeout=60) as client:
        client.sendall(service.head(*headers).decode().encode("latin-1") + b"{}")
        client.shutdown(socket.SHUT_WR)
        reply = read_all(client).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    head, _, body = reply.partition(b"\r\n\r\n")
    refused = int(head.split()[1])
    assert refused == status or (status == 400 and refused in (411, 414, 431)), reply[:200]
    assert said(json.loads(body))


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET\r\n\r\n", b"\r\n" * 3]
)
@ONE_OF_EACH_KIND
def test_what_is_no_http_is_refused(service: Service, garbage: bytes) -> None:
    with socket.create_connection(service.address, timeout=60) as client:
        client.sendall(garbage)
        client.shutdown(socket.SHUT_WR)
        assert b" 5" not in read_all(client)[:20]
    assert service.post(plain(service))[0] == 200


@ONE_OF_EACH_KIND
def test_a_method_that_is_not_known_is_refused(service: Service) -> None:
    content = service.head("Content-Length: 0", "Connection: close").replace(b"POST", b"BREW", 1)
    assert service.send(content).split()[1] in (b"404", b"405")


# ---------------------------------------------------------------------- slow clients


@pytest.mark.parametrize("part", ["headers", "body"])
@ONE_OF_EACH_KIND
def test_a_client_that_sends_byte_by_byte_is_dropped(
    service: Service, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, f"SECONDS_FOR_{part.upper()}", 0.5)
    content = service.head(*(["X: " + "y" * 5000] if part == "headers" else []))
    start = content[:20] if part == "headers" else service.head("Content-Length: 5000")
    with socket.create_connection(service.address, timeout=60) as client:
        client.sendall(start)
        client.settimeout(0.05)
        reply = b""
        for byte in content[20:] if part == "headers" else b" " * 4999:
            with suppress(ConnectionError):
                client.sendall(bytes([byte]))
            with suppress(TimeoutError):
                reply = client.recv(2**16)
                break
        client.settimeout(60)
        with suppress(ConnectionError):
            reply = read_reply(client, reply)
        assert reply.split()[1] == b"408"
        assert f"the {part} of a request must be there within 0.5 s".encode() in reply


@ONE_OF_EACH_KIND
def test_clients_that_send_nothing_are_dropped_and_others_served(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        silent = []
        monkeypatch.setattr(web, "SECONDS_FOR_HEADERS", 2.0)
        for _ in range(50):
            silent.append(stack.enter_context(socket.create_connection(service.address, 60)))
        assert service.post(plain(service))[0] == 200
        assert [read_all(client) for client in silent] == [b""] * 50


@ONE_OF_EACH_KIND
def test_a_body_that_ends_early_is_refused(service: Service) -> None:
    with socket.create_connection(service.address, timeout=60) as client:
        client.sendall(service.head("Content-Length: 99") + b"{")
        client.shutdown(socket.SHUT_WR)
        reply = read_all(client)
    assert reply.split()[1] == b"400"
    assert b"the body ended" in reply


@ONE_OF_EACH_KIND
def test_a_body_that_is_too_large_is_refused_before_it_is_sent(service: Service) -> None:
    most = 8 if service.path == "/retrieve" else 32
    with socket.create_connection(service.address, timeout=60) as client:
        client.sendall(service.head(f"Content-Length: {most * 2**20 + 1}"))
        reply = read_reply(client)  # nothing of the body was sent
    assert reply.split()[1] == b"413"
    assert f"may have {most * 2**20} bytes, not {most * 2**20 + 1}".encode() in reply


@ONE_OF_EACH_KIND
def test_a_client_that_sends_too_much_hears_so(service: Service) -> None:
    status, answer = service.post(b" " * (33 * 2**20))
    assert status == 413
    assert said(answer)


@pytest.mark.parametrize("service", ["chat"], indirect=True)
def test_chunks_that_are_too_many_are_refused(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "MAX_REQUEST_BYTES", 2**20)
    chunk = b"%x\r\n%b\r\n" % (2**16, b" " * 2**16)
    with socket.create_connection(service.address, timeout=60) as client:
        client.sendall(service.head("Transfer-Encoding: chunked") + chunk * 17)
        reply = read_reply(client)  # the body has not ended
    assert reply.split()[1] == b"413"


def test_a_client_that_does_not_take_its_answer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "SECONDS_TO_TAKE_ANSWER", 0.5)
    size = 2**26
    with serving(size) as address, socket.create_connection(address, timeout=60) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        client.recv(1)
        time.sleep(2.0)  # nothing is read
        with suppress(ConnectionError):
            assert len(read_all(client)) < size


# ---------------------------------------------------------------------- memory


def test_memory_goes_back_after_large_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = threading.Event()
    monkeypatch.setattr("caldera.web.trim_heap", trimmed.set)
    with serving(2**24) as address:
        small = Service(address, "/", {})
        assert small.send(small.head("Content-Length: 0", "Connection: close"))
        assert trimmed.wait(60)
        trimmed.clear()
        assert small.post(b" " * 2**23)[0] == 200
        assert trimmed.wait(60)


def test_the_heap_shrinks() -> None:
    code = (
        "import re; from pathlib import Path; from caldera.heap import trim_heap\n"
        "def held(): return int(re.search(r'VmRSS:\\s+(\\d+)', "
        "Path('/proc/self/status').read_text())[1])\n"
        "pieces = [bytes(4000) for _ in range(50_000)]\n"
        "last = bytes(4000); del pieces; before = held(); trim_heap(); print(before - held())"
    )
    if not os.path.exists("/proc/self/status"):
        pytest.skip("reads /proc")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert int(done.stdout) > 100_000, done.stderr


def test_a_server_ends_at_once_where_connections_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "SECONDS_TO_END", 600.0)
    for _ in range(20):  # a reply has only just gone out
        with ExitStack() as stack:
            with serving(1) as address:
                client = stack.enter_context(socket.create_connection(address, timeout=60))
                client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
                assert read_reply(client).endswith(b'"x"')
            assert read_all(client) == b""


@contextmanager
def serving(size: int) -> Iterator[tuple[str, int]]:
    """A server whose answers have that many bytes."""
    answer = json.dumps("x" * size).encode()

    async def handle(request: Request) -> Reply:
        return Reply(200, answer)

    with HttpServer(handle, "127.0.0.1") as server:
        yield parts(server.address)
