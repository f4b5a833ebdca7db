"""Calls of score functions: at once, in any order, and never for ever."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import pytest

from caldera.errors import RewardError
from caldera.reward.scoring import CallTimeout, ThreadScoring

SHORT = 0.2  # seconds, where every call hangs
ENOUGH = 3.0  # seconds, in which a call that does not hang has ended


def submit_all(scoring: ThreadScoring, *values: Any) -> list[Any]:
    return [scoring.submit({"value": value}, f"row {value}") for value in values]


def wait_for_no_threads() -> None:
    deadline = time.monotonic() + 30
    while any(thread.name == "scoring" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets functions go that hang in a test, when it is over."""
    event = threading.Event()
    yield event
    event.set()


def test_calls_of_one_thread_come_in_order() -> None:
    seen: list[int] = []
    scoring = ThreadScoring(lambda value: seen.append(value), timeout=None)
    wait(submit_all(scoring, *range(50)))
    assert seen == list(range(50))


def test_calls_run_at_once_on_several_threads() -> None:
    meeting = threading.Barrier(3, timeout=30)
    scoring = ThreadScoring(lambda value: (meeting.wait(), value)[1], None, num_workers=3)
    assert [call.result() for call in submit_all(scoring, 1, 2, 3)] == [1, 2, 3]


def test_async_calls_run_at_once_on_one_thread() -> None:
    arrived: list[int] = []
    all_here = asyncio.Event()

    async def meet(value: int) -> int:
        arrived.append(value)
        if len(arrived) == 3:
            all_here.set()
        await all_here.wait()  # one after the other, this would wait for ever
        return value

    scoring = ThreadScoring(meet, timeout=None)
    assert [call.result() for call in submit_all(scoring, 3, 1, 2)] == [3, 1, 2]


def test_a_resource_of_the_event_loop_outlives_a_batch() -> None:
    made: dict[str, Any] = {}

    async def use_the_queue(value: int) -> int:
        queue = made.setdefault("queue", asyncio.Queue())
        # Waiting binds a queue to its loop; in another loop it would raise.
        asyncio.get_running_loop().call_soon(queue.put_nowait, value)
        return int(await queue.get())

    scoring = ThreadScoring(use_the_queue, timeout=None)
    assert submit_all(scoring, 1)[0].result() == 1
    assert submit_all(ThreadScoring(use_the_queue, None), 2)[0].result() == 2


def test_what_a_function_raises_is_in_its_place() -> None:
    def fail(value: Any) -> None:
        raise (SystemExit if value == 1 else KeyError)(value)

    one, two = submit_all(ThreadScoring(fail, timeout=None), 1, 2)
    assert "raised SystemExit: 1" in str(one.exception())  # which ends nothing but the call
    assert isinstance(two.exception(), KeyError)


def test_a_function_that_hangs_is_left_behind_and_the_others_go_on(
    release: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    def hang_on_one(value: int) -> int:
        if value == 1:
            release.wait()
        return value

    scoring = ThreadScoring(hang_on_one, ENOUGH)
    with caplog.at_level(logging.WARNING):
        first, hung, last = submit_all(scoring, 0, 1, 2)
        assert (first.result(), last.result()) == (0, 2)
        assert isinstance(hung.exception(), CallTimeout)
        while not (left := [m for m in caplog.messages if "has not come back" in m]):
            time.sleep(0.01)  # the watching thread logs after it has answered
    assert len(left) == 1
    assert left[0].startswith("row 1: ") and "reward_manager=prime" in left[0]


def test_more_hung_calls_than_threads(release: threading.Event) -> None:
    scoring = ThreadScoring(lambda value: release.wait() if value else 0, ENOUGH, num_workers=2)
    *hung, fine = submit_all(scoring, 1, 1, 1, 0)
    assert all(isinstance(call.exception(), CallTimeout) for call in hung)
    assert fine.result() == 0
    release.set()  # whoever comes back late must not work on
    assert [call.result() for call in submit_all(scoring, 0, 0)] == [0, 0]
    wait_for_no_threads()


def test_an_async_function_that_hangs_is_cancelled() -> None:
    cancelled = threading.Event()

    async def hang(value: int) -> int:
        try:
            await asyncio.sleep(10_000 if value else 0)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return value

    hung, fine = submit_all(ThreadScoring(hang, ENOUGH), 1, 0)
    assert fine.result() == 0
    assert isinstance(hung.exception(), CallTimeout)
    assert cancelled.wait(30)


@pytest.mark.timeout(60)
def test_garbage_collection_leaves_calls_alone() -> None:
    started = threading.Event()

    async def wait_for_nobody(value: int) -> None:
        started.set()
        await asyncio.Event().wait()  # which nothing but this call knows of

    (hung,) = submit_all(ThreadScoring(wait_for_nobody, SHORT), 1)
    assert started.wait(30)
    while not hung.done():
        gc.collect()
        time.sleep(0.01)
    assert isinstance(hung.exception(), CallTimeout)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("in_a_task", [False, True])
def test_an_async_function_that_would_stop_the_loop(
    error: type[BaseException], in_a_task: bool
) -> None:
    async def stop() -> None:
        raise error("enough")

    async def stop_on_one(value: int) -> int:
        if value == 1:
            await (asyncio.create_task(stop()) if in_a_task else stop())
        await asyncio.sleep(0.01)
        return value

    first, stopped, last = submit_all(ThreadScoring(stop_on_one, None), 0, 1, 2)
    assert (first.result(30), last.result(30)) == (0, 2)
    with pytest.raises(RewardError, match=rf"raised {error.__name__}: enough \(test_scoring.py:"):
        stopped.result(30)


def test_an_async_function_that_blocks_its_loop(
    release: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    async def block(value: int) -> int:
        if value:
            release.wait()
        return value

    scoring = ThreadScoring(block, ENOUGH)
    with caplog.at_level(logging.WARNING):
        (hung,) = submit_all(scoring, 1)
        assert isinstance(hung.exception(), CallTimeout)
        deadline = time.monotonic() + 30
        while not any("blocks its event loop" in m for m in caplog.messages):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert submit_all(scoring, 0)[0].result() == 0


def test_threads_end_when_there_is_nothing_to_do() -> None:
    scoring = ThreadScoring(lambda value: value, None, num_workers=4)
    wait(submit_all(scoring, *range(20)))
    wait_for_no_threads()


def test_with_a_gate_awaited_calls_take_turns() -> None:
    running: list[int] = []
    most: list[int] = []

    async def count(value: int) -> int:
        running.append(value)
        await asyncio.sleep(0)
        most.append(len(running))
        running.remove(value)
        return value

    admitted: list[bool] = []
    scoring = ThreadScoring(count, None, 1, admit=lambda: admitted.append(True))
    assert [call.result() for call in submit_all(scoring, 1, 2, 3)] == [1, 2, 3]
    assert most == [1, 1, 1] and len(admitted) == 3
