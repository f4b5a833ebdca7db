"""The sandbox's HTTP server: verdicts that cannot be forged, and a queue that is fair."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import pytest

from caldera.config.reward import SandboxFusionConfig
from caldera.errors import RewardError
from caldera.reward import default
from caldera.reward.default import default_score_function
from caldera.reward.scoring import ThreadScoring
from caldera.sandbox import Limits, Sandbox, SandboxFusionClient, fusion, server
from caldera.sandbox.server import SandboxServer

LIMITS = Limits(wall_seconds=60.0, cpu_seconds=60, memory_mb=256)
PATIENCE = 60.0  # seconds, of a test that would otherwise wait forever
SLEEPER = "import time\ntime.sleep(600)\n"
RIGHT = "def square(x):\n    return x * x\n"
TESTS = "assert square(3) == 9\nassert square(4) == 16\n"
TRUTH = json.dumps({"assert_case": TESTS.splitlines()})
FORGERIES = {
    "exec": "exec = lambda *_: None\n",
    "builtins.exec": "import builtins\nbuiltins.exec = lambda *_: None\n",
    "equal": "class Right:\n    def __eq__(self, other):\n        return True\n"
    "def square(x):\n    return Right()\n",
    "int": "class Right(int):\n    def __eq__(self, other):\n        return True\n"
    "def square(x):\n    return Right()\n",
    "reads the mark": "import re, sys\ndef square(x):\n    frame = sys._getframe()\n"
    "    while frame:\n"
    "        for text in map(str, frame.f_code.co_consts):\n"
    "            for mark in re.findall('[0-9a-f]{32}', text):\n                print(mark)\n"
    "        frame = frame.f_back\n    import os\n    sys.stdout.flush()\n    os._exit(0)\n",
    "exits": "import os\nos._exit(0)\n",
    "empty": "",
}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture(scope="module")
def served() -> Iterator[SandboxServer]:
    with Sandbox(LIMITS, slots=2) as sandbox, SandboxServer(sandbox, "127.0.0.1", 0) as served:
        yield served


def score(url: str, code: str) -> float:
    scored = default_score_function(SandboxFusionConfig(url=url))("mbpp", code, TRUTH)
    assert isinstance(scored, dict)
    return float(scored["score"])


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------------- verdicts


def test_the_server_says_what_the_sandbox_says_of_tests(served: SandboxServer) -> None:
    asked = SandboxFusionClient(served.url, LIMITS)
    for program in (RIGHT, "def square(x):\n    return 9\n", ""):
        there, here = asked.check(program, TESTS), served.sandbox.check(program, TESTS)
        assert there is not None
        assert (there.status, there.raised) == (here.status, here.raised)
    slow = asked.check(f"{SLEEPER}{RIGHT}", TESTS, replace(LIMITS, wall_seconds=0.5))
    assert slow is not None and slow.status == "timed out"


@pytest.mark.parametrize("name", FORGERIES)
def test_no_pass_is_forged_through_the_server(name: str, served: SandboxServer) -> None:
    assert score(served.url, FORGERIES[name]) == 0.0
    assert score(served.url, RIGHT) == 1.0


def test_bad_requests_for_a_check_are_refused(served: SandboxServer) -> None:
    with pytest.raises(RewardError, match=r"422.*code and tests must be strings"):
        SandboxFusionClient(served.url, attempts=1).check(RIGHT, 1)  # type: ignore[arg-type]


def test_a_server_that_only_runs_programs_is_warned_of_once(
    served: SandboxServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(fusion.ANSWERS, "/check")
    default._client.cache_clear()
    with caplog.at_level(logging.WARNING, fusion.__name__):
        assert score(served.url, RIGHT) == 1.0
        assert score(served.url, "def square(x):\n    return 9\n") == 0.5
    default._client.cache_clear()
    (warning,) = caplog.messages
    assert warning.startswith(f"{served.url}/run_code only runs programs")
    assert "forge a pass" in warning


def test_a_server_that_has_judged_is_not_trusted_with_less(
    served: SandboxServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = SandboxFusionClient(served.url, LIMITS)
    assert asked.check(RIGHT, TESTS)
    monkeypatch.delitem(fusion.ANSWERS, "/check")
    with pytest.raises(RewardError, match="/check: HTTP Error 404"):
        asked.check(RIGHT, TESTS)


# ---------------------------------------------------------------------- the queue


def request_of(code: str, seconds: float) -> bytes:
    body = json.dumps({"code": code, "language": "python", "run_timeout": seconds}).encode()
    return b"POST /run_code HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def test_time_in_the_queue_is_neither_the_programs_nor_the_clients(
    served: SandboxServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SECONDS_BETWEEN_SIGNS", 0.1)
    monkeypatch.setattr(fusion, "SECONDS_IN_QUEUE", 1.0)
    asked = SandboxFusionClient(served.url, LIMITS, max_concurrent=64, attempts=1)
    short = replace(LIMITS, wall_seconds=0.15)
    queued = replace(LIMITS, wall_seconds=2.0)  # less than the time until its turn
    with ThreadPoolExecutor(64) as threads:
        for _ in range(63):
            threads.submit(asked.run, SLEEPER, limits=short)
        wait_until(lambda: served.sandbox.waiting > 45)
        right = threads.submit(asked.check, RIGHT, TESTS, queued)
        outcome = right.result(PATIENCE)
    assert outcome is not None and outcome.ok


@pytest.mark.parametrize("where", ["here", "server"])
def test_sleeping_programs_do_not_take_the_time_of_the_right_one(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It waits longer for its turn than a score function may take."""
    limits = replace(LIMITS, wall_seconds=1.0)
    with Sandbox(limits, slots=1) as sandbox, SandboxServer(sandbox, "127.0.0.1", 0) as served:
        monkeypatch.setattr(default, "_sandbox", lambda *given: sandbox)
        config = SandboxFusionConfig(url=served.url if where == "server" else None)
        scoring = ThreadScoring(default_score_function(config), timeout=2.5, num_workers=4)
        answers = [SLEEPER, SLEEPER, SLEEPER, RIGHT]
        given = {"data_source": "mbpp", "ground_truth": TRUTH}
        scores = [scoring.submit(given | {"solution_str": code}, "row") for code in answers]
        wait(scores)
    assert [future.exception() for future in scores] == [None] * 4
    assert [future.result()["score"] for future in scores] == [0.0, 0.0, 0.0, 1.0]


def test_what_nobody_waits_for_any_more_is_dropped_and_killed(served: SandboxServer) -> None:
    address = "127.0.0.1", served.port
    connections = [socket.create_connection(address) for _ in range(12)]
    for connection in connections:
        connection.sendall(request_of(SLEEPER, 60.0))
    wait_until(lambda: served.sandbox.waiting == 10)  # and two run, for a minute each
    with ThreadPoolExecutor(1) as threads:
        asked = SandboxFusionClient(served.url, LIMITS)
        right = threads.submit(asked.check, RIGHT, TESTS)
        wait_until(lambda: served.sandbox.waiting == 11)
        for connection in connections:
            connection.close()
        outcome = right.result(PATIENCE / 2)
    assert outcome is not None and outcome.ok
    wait_until(lambda: served.sandbox.waiting == 0)


def test_an_old_client_gets_its_answer_in_one_piece(
    served: SandboxServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SECONDS_BETWEEN_SIGNS", 0.0)
    address = "127.0.0.1", served.port
    for version, is_chunked in ((b"HTTP/1.0", False), (b"HTTP/1.1", True)):
        with socket.create_connection(address) as connection:
            request = request_of("print(6 * 7)", 30.0).replace(b"HTTP/1.1", version)
            connection.sendall(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            with connection.makefile("rb") as reply:
                text = reply.read().decode()
        assert ("Transfer-Encoding: chunked" in text) == is_chunked
        assert '"stdout": "42\\n"' in text
