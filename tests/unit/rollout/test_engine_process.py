"""An engine in a process of its own, with a host of a few lines at the other end."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from caldera.errors import RolloutError
from caldera.rollout.engines.host.caldera_engine.base import Event
from caldera.rollout.engines.host.caldera_engine.frames import Frames
from caldera.rollout.engines.process import EngineDied, EngineProcess

HOST = """
import socket, sys
from caldera_engine.frames import Frames

frames = Frames(socket.socket(fileno=int(sys.argv[1])))
arguments = frames.receive()
frames.send({"answer": None})
try:
    while order := frames.receive():
        if order["do"] == "score":
            frames.send({"answer": arguments["random_seed"]})
        elif order["prompt_ids"] == [13]:
            sys.exit("out of luck")
        else:
            tokens = order["prompt_ids"]
            event = {"number": order["number"], "token_ids": tokens, "log_probs": tokens}
            frames.send({"events": [{**event, "version": 0}]})
except ConnectionError:
    pass
"""


def test_messages_arrive_whole() -> None:
    ours, theirs = map(Frames, socket.socketpair())
    messages = [{"n": n, "text": "x" * 70_000} for n in range(3)]
    for message in messages[:2]:
        ours.send(message)
        assert theirs.receive() == message
    ours.close()
    with pytest.raises(ConnectionError):
        theirs.receive()
    theirs.close()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[EngineProcess]:
    """Tells each request back, dies of 13, and knows its seed."""
    (tmp_path / "host.py").write_text(HOST)
    python = tmp_path / "python"  # called with -m caldera_engine SOCKET NAME
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/host.py "$3"\n')
    python.chmod(0o755)
    made = EngineProcess(str(python), "sglang", {"random_seed": 42}, {})
    yield made
    made.close()


def test_megabytes_go_both_ways_at_once(process: EngineProcess) -> None:
    def send() -> None:
        for number in range(100):
            process.add(number, [10_000] * 10_000, {}, 0)

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    sending.join(60)
    assert not sending.is_alive()
    events: list[Event] = []
    while len(events) < 100:
        events += process.step()
    assert [event.number for event in events] == list(range(100))


def test_an_engine_that_died_says_why_and_begins_anew(process: EngineProcess) -> None:
    seed, first = process.score([1]), process.pid
    process.add(0, [13], {}, 0)
    with pytest.raises(EngineDied, match=r"ended with status 1\nout of luck"):
        process.step()
    socket_before = process.fileno()
    process.start()
    assert process.pid != first and process.score([1]) != seed
    assert process.fileno() == socket_before  # which was closed, and free again


def test_a_python_that_is_not_there() -> None:
    with pytest.raises(RolloutError, match=r"engine_python='/nowhere/python'.*cannot be run"):
        EngineProcess("/nowhere/python", "vllm", {}, {})


def test_an_engine_that_does_not_start_says_why() -> None:
    with pytest.raises(RolloutError, match=r"does not start.*No module named"):
        EngineProcess(sys.executable, "vllm", {}, {})
