"""The router in front of several servers, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from caldera.errors import ConfigError
from caldera.web import HttpServer, Reply, Request, error_reply, json_reply
from caldera.workers import reward_router
from caldera.workers.reward_router import Router


class Backend:
    """Answers with its number, or as it is told; waits while its gate is shut."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.status = 200
        self.gate = threading.Event()
        self.gate.set()
        self.requests: list[Request] = []
        self.arrived = threading.Semaphore(0)
        self.http = HttpServer(self.handle, "127.0.0.1")

    async def handle(self, request: Request) -> Reply:
        self.requests.append(request)
        self.arrived.release()
        while not self.gate.is_set():
            await asyncio.sleep(0.001)
        if self.status != 200:
            return error_reply(self.status, f"backend {self.number}")
        return json_reply({"backend": self.number})


@pytest.fixture
def backends() -> Iterator[list[Backend]]:
    made = [Backend(number) for number in range(3)]
    yield made
    for backend in made:
        backend.gate.set()
        backend.http.close()


@pytest.fixture
def router(backends: list[Backend]) -> Iterator[Router]:
    with ExitStack() as stack:
        router = Router("127.0.0.1", [backend.http.address for backend in backends])
        stack.callback(router.close)
        yield router


def ask(router: Router, path: str = "/classify", body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(f"http://{router.address}{path}", data)
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_requests_and_answers_pass_as_they_are(router: Router, backends: list[Backend]) -> None:
    assert ask(router, "/v1/x?y=1&z=2", {"input": "é"}) == (200, {"backend": 0})
    assert ask(router, "/health") == (200, {"backend": 1})
    assert backends[0].requests == [Request("POST", "/v1/x?y=1&z=2", b'{"input": "\\u00e9"}')]
    assert backends[1].requests == [Request("GET", "/health")]


def test_idle_servers_take_turns(router: Router) -> None:
    assert [ask(router)[1]["backend"] for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_least_loaded_is_asked(router: Router, backends: list[Backend]) -> None:
    backends[0].gate.clear()
    backends[2].gate.clear()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(ask, router)  # 0 has it, and holds it
        backends[0].arrived.acquire()
        assert ask(router)[1] == {"backend": 1}
        second = threads.submit(ask, router)
        backends[2].arrived.acquire()
        assert [ask(router)[1]["backend"] for _ in range(4)] == [1, 1, 1, 1]
        backends[0].gate.set()
        backends[2].gate.set()
        assert (first.result()[1], second.result()[1]) == ({"backend": 0}, {"backend": 2})


def test_a_server_that_fails_rests(router: Router, backends: list[Backend]) -> None:
    backends[0].http.close()
    backends[1].status = 500
    assert [ask(router)[1] for _ in range(5)] == [{"backend": 2}] * 5
    assert len(backends[1].requests) == 1
    backends[1].status = 200
    backends[2].status = 503
    assert ask(router)[1] == {"backend": 1}  # one that rests is better than none


def test_it_is_asked_again_after_its_rest(
    router: Router, backends: list[Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_router, "SECONDS_OF_REST", 0.0)
    backends[0].status = 500
    assert ask(router)[1] == {"backend": 1}
    backends[0].status = 200
    assert {ask(router)[1]["backend"] for _ in range(3)} == {0, 1, 2}


def test_when_all_fail_the_last_answer_is_passed_back(
    router: Router, backends: list[Backend]
) -> None:
    for backend in backends:
        backend.status = 503
    status, answer = ask(router)
    assert status == 503
    assert answer["error"]["message"].startswith("backend ")
    for backend in backends:
        backend.http.close()
    assert ask(router)[0] == 502


def test_a_clients_mistake_goes_to_no_other_server(router: Router, backends: list[Backend]) -> None:
    backends[0].status = 400
    assert ask(router)[0] == 400
    assert sum(len(backend.requests) for backend in backends) == 1


def test_servers_may_come_later(backends: list[Backend]) -> None:
    router = Router("127.0.0.1")
    assert ask(router)[0] == 503
    router.use([f"http://{backends[1].http.address}/below/"])
    assert ask(router)[1] == {"backend": 1}
    assert backends[1].requests[0].path == "/below/classify"
    router.close()


def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError, match="'ftp://x' is not the address of an HTTP server"):
        Router("127.0.0.1", ["ftp://x"])


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ConfigError, match=r"^cannot listen on 192\.0\.2\.1: "):
        Router("192.0.2.1")
