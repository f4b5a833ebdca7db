"""An engine in a process of its own, with a host of a few lines at the other end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from caldera.errors import RolloutError
from caldera.rollout.engines.host.caldera_engine.base import Event
from caldera.rollout.engines.process import EngineDied, EngineProcess

HOST = """
import sys
from caldera_engine import __main__ as host
from caldera_engine.base import Event

class Echo:
    def __init__(self, seed):
        self.seed, self.events = seed, []

    def add(self, number, prompt_ids, **_):
        if prompt_ids == [13]:
            sys.exit("out of luck")
        self.events.append(Event(number, prompt_ids, prompt_ids, 0))

    def has_work(self):
        return bool(self.events)

    def step(self):
        return [self.events.pop(0)]

    def score(self, prompt_ids):
        return self.seed

    def close(self):
        pass

host.build_engine = lambda name, arguments: Echo(arguments["random_seed"])
host.main()
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[EngineProcess]:
    """Tells each request back, dies of 13, and knows its seed."""
    (tmp_path / "host.py").write_text(HOST)
    python = tmp_path / "python"  # called with -m caldera_engine SOCKET NAME
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/host.py "$3" "$4"\n')
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
    descriptor = process.connection.fileno()
    process.start()
    assert process.pid != first and process.score([1]) != seed
    assert process.connection.fileno() == descriptor  # which was closed, and free again


def test_a_python_that_is_not_there() -> None:
    with pytest.raises(RolloutError, match=r"engine_python='/nowhere/python'.*cannot be run"):
        EngineProcess("/nowhere/python", "vllm", {}, {})


def test_an_engine_that_does_not_start_says_why() -> None:
    with pytest.raises(RolloutError, match=r"does not start.*No module named"):
        EngineProcess(sys.executable, "vllm", {}, {})
