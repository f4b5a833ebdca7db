"""What becomes of requests that are still read, or fail in their midst, is counted once."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from caldera.rollout import Piece
from caldera.serving.server import SMALL_BYTES, Account

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 8}
LARGE = {"messages": [{"role": "user", "content": "z" * SMALL_BYTES}], "max_tokens": 8}
Serve = Callable[..., Any]


@pytest.fixture
def slow(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, threading.Event]]:
    """A server that reads no prompt to its end before the event is set."""
    served, may_go_on = serve(), threading.Event()

    def tokens(*_: Any) -> tuple[list[int], int]:
        assert may_go_on.wait(30)
        return [5, 6, 7], 0

    monkeypatch.setattr(served.server._prompts, "tokens", tokens)
    yield served, may_go_on
    may_go_on.set()


def test_closing_waits_for_what_is_read(slow: tuple[Any, threading.Event]) -> None:
    served, may_go_on = slow
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(served.ask, CHAT, LARGE)
        wait_until(lambda: served.server.metrics.running.total() == 1)
        account = pool.submit(served.server.close)
        wait_until(lambda: served.server._away is not None)
        may_go_on.set()
        assert reply.result().status_code == 503
        assert "the server is shutting down" in reply.result().text
        assert account.result() == Account(answered=0, refused=1, cancelled=0, cut_off=0, lost=0)


def test_who_goes_away_while_read_is_counted(slow: tuple[Any, threading.Event]) -> None:
    served, _ = slow
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(f"http://{served.server.address}{CHAT}", json=LARGE, timeout=0.3)
    wait_until(lambda: served.metric("requests_cancelled_total") == 1)
    assert served.metric("requests_running") == 0


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_mistake_in_a_stream_is_told(
    serve: Serve, has_begun: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    async def stream(*_: Any) -> AsyncGenerator[Piece, None]:
        if has_begun:
            yield Piece([70], [-0.5])
        raise ZeroDivisionError("none of the expected ones")

    served = serve()
    monkeypatch.setattr(served.sampler, "stream", stream)
    reply = served.ask(CHAT, {**ASKED, "stream": True})
    assert reply.status_code == (200 if has_begun else 500)
    assert "ZeroDivisionError: none of the expected ones" in reply.text
    assert reply.text.count('"server_error"') == 1 and "[DONE]" not in reply.text
    assert caplog.text.count(f"POST {CHAT} failed") == 1
    assert served.metric("requests_lost_total") == 1
    assert served.metric("requests_cancelled_total") == served.metric("requests_running") == 0


def wait_until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)
