"""The screen that a failing worker ends a run with."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from pathlib import Path

import pytest

from caldera.errors import WorkerError
from caldera.single_controller.failure import (
    STACK_FILE_HEAD,
    RankFailure,
    WaitingRank,
    exception_failure,
    exit_failure,
    first_failure,
    request_stack,
    silence_failure,
    worker_error,
)

IN_ALL_REDUCE = ('  File "/lib/torch/distributed/distributed_c10d.py", line 9 in all_reduce',)
IN_SLEEP = ('  File "/home/me/worker.py", line 3 in work',)


def test_one_screen() -> None:
    first = RankFailure(1, "train", "ValueError: too long", ("  File worker.py, line 7",), "/l/1")
    second = RankFailure(2, "train", "killed by SIGABRT", ("unseen",), "/l/2", at=first.at + 1)
    waiting = [WaitingRank(0, "train", IN_ALL_REDUCE, "/l/0"), WaitingRank(3, "train", ())]
    error = worker_error("actor", 4, [second, first], waiting)
    assert isinstance(error, WorkerError)
    assert str(error).splitlines() == [
        "worker group actor: rank 1 of 4 failed in train",
        "  ValueError: too long",
        "    File worker.py, line 7",
        "  log: /l/1",
        "rank 2 failed in train as well",
        "  killed by SIGABRT",
        "  log: /l/2",
        "rank 0 was still in train",
        '    File "/lib/torch/distributed/distributed_c10d.py", line 9 in all_reduce',
        "  log: /l/0",
        "rank 3 was still in train",
        "  (it showed no stack)",
        "All ranks of the group have been ended.",
    ]


def test_a_consequence_is_not_the_first() -> None:
    lost = RankFailure(0, "train", "Connection closed by peer", in_collective=True, at=1.0)
    killed = RankFailure(1, "train", "killed", at=2.0)
    raised = RankFailure(2, "train", "raised", at=3.0)
    assert first_failure([raised, lost, killed]) is killed
    assert first_failure([lost]) is lost


def test_an_exception() -> None:
    def read(name: str) -> None:
        raise KeyError(name)

    with pytest.raises(KeyError) as caught:
        read("responses")
    failure = exception_failure(2, "train", caught.value, "/logs/2")
    assert (failure.rank, failure.method, failure.log) == (2, "train", "/logs/2")
    assert failure.what == "KeyError: 'responses'"
    assert "raise KeyError(name)" in "\n".join(failure.details)
    assert not failure.in_collective


def test_exceptions_of_collectives_are_known() -> None:
    lost = RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert exception_failure(0, "train", lost).in_collective
    assert not exception_failure(0, "train", ValueError("gloo")).in_collective


def test_exits(tmp_path: Path) -> None:
    log = tmp_path / "rank1.log"
    log.write_text("".join(f"line {i}\n" for i in range(50)))
    killed = exit_failure(1, "train", -signal.SIGKILL, str(log))
    assert killed.what.startswith("its process was killed by SIGKILL (as the kernel does")
    assert killed.details == tuple(f"line {i}" for i in range(40, 50))
    segfault = exit_failure(1, "train", -signal.SIGSEGV, str(log))
    assert segfault.what == "its process was killed by SIGSEGV"
    unknown = exit_failure(1, "", 3, str(tmp_path / "missing"))
    assert (unknown.what, unknown.details) == ("its process exited with status 3", ())
    assert "rank 1 of 2 failed between calls" in str(worker_error("actor", 2, [unknown], []))
    assert exit_failure(0, "", None, "").what == "its process closed the connection"


def test_a_crash_shows_where_it_was(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    frames = [f'  File "/lib/f{i}.py", line {i} in f{i}' for i in range(20)]
    log.write_text(
        "before\nFatal Python error: Segmentation fault\n\nThread 0x01 (most recent call first):\n"
        '  File "/lib/other.py", line 1 in other\n\nCurrent thread 0x02 (most recent call first):\n'
        + "\n".join(frames)
    )
    shown = exit_failure(0, "train", -signal.SIGSEGV, str(log)).details
    assert shown == ("Fatal Python error: Segmentation fault", *frames[:8])


def test_silence_is_of_the_rank_that_the_others_wait_for() -> None:
    waiting = [WaitingRank(0, "work", IN_ALL_REDUCE), WaitingRank(1, "work", IN_SLEEP, "/l/1")]
    failure = silence_failure(waiting, 3.0)
    assert (failure.rank, failure.what) == (1, "no answer for 3 s")
    assert failure.details == IN_SLEEP
    assert silence_failure(waiting[:1], 3.0).rank == 0
    screen = str(worker_error("actor", 2, [failure], waiting))
    assert "rank 0 was still in work" in screen
    assert "rank 1 was still in work" not in screen


def test_the_stack_of_a_process(tmp_path: Path) -> None:
    path = tmp_path / "stack"
    path.touch()
    assert request_stack(os.getpid(), path) == ()  # not ready: no signal is sent
    with path.open("a") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            print(f"{STACK_FILE_HEAD}{threading.get_ident():x}", file=file, flush=True)
            threading.Thread(target=threading.Event().wait, args=(1,), daemon=True).start()
            for _ in range(2):  # the second is not mixed with the first
                stack = request_stack(os.getpid(), path)
                text = "".join(stack)
                assert text.count("in test_the_stack_of_a_process") == 1
                assert "single_controller/failure.py" not in text
                assert "threading.py" not in text
                assert "in test_the_stack_of_a_process" in stack[-1]
        finally:
            faulthandler.unregister(signal.SIGUSR1)
