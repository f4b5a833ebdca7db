"""Score functions in subprocesses, which can be ended."""

from __future__ import annotations

import functools
import inspect
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle

from caldera.errors import ConfigError, RewardError
from caldera.reward.child import serve_calls
from caldera.reward.custom import CustomScore
from caldera.reward.explaining import in_words
from caldera.reward.manager import REWARD_MANAGERS, NaiveRewardManager
from caldera.reward.scoring import CallTimeout, Scoring, ThreadScoring, attempt
from caldera.single_controller.transport import start_without_main

logger = logging.getLogger(__name__)

SECONDS_TO_START = 300.0  # in which the file of a function has been run
SLOW_PROCESSES = 16  # beyond those of the workers: each has separate memory
SECONDS_TO_DIE = 5.0  # between the end of a connection and that of its process


@REWARD_MANAGERS.register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """The naive manager with a process for each of the calls that run at once.

    A call that takes too long ends its process, and another one is started. Functions are found
    again in the process by their file or package, so that they need not be pickled whole.
    """

    @functools.cached_property
    def _scoring(self) -> Scoring:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # that share this machine's cores
        workers = self.limits.num_workers or max(1, (os.cpu_count() or 1) // ranks)
        return ProcessScoring(self.compute_score, self.limits.timeout, workers)


@REWARD_MANAGERS.register("remote")
class RemoteRewardManager(PrimeRewardManager):
    """The same for plain functions alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        function = self.compute_score
        inner = function.function if isinstance(function, CustomScore) else function
        if inspect.iscoroutinefunction(inner):
            raise ConfigError(
                "reward_model.reward_manager='remote' takes plain functions, and "
                "custom_reward_function is async: takes naive, prime or limited"
            )


class ProcessScoring:
    """Runs a function in up to `num_workers` processes, which are kept for the next calls."""

    def __init__(
        self, function: Callable[..., Any], timeout: float | None, num_workers: int
    ) -> None:
        pickled = attempt(cloudpickle.dumps, function)
        if (error := pickled.exception()) is not None:
            raise ConfigError(
                "reward_model.reward_manager=prime or remote: the score function cannot be sent to "
                f"another process ({in_words(error)}): give it by custom_reward_function.path"
            )
        self._function: bytes = pickled.result()
        self._timeout = timeout
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        # Each thread waits for one process. The process has the time limit, not the thread.
        self._threads = ThreadScoring(self._call, None, num_workers, most_beside=SLOW_PROCESSES)

    def submit(self, arguments: Mapping[str, Any], name: str) -> Future[Any]:
        return self._threads.submit({"arguments": arguments, "name": name}, name)

    def _call(self, arguments: Mapping[str, Any], name: str) -> Any:
        message = pickle.dumps(dict(arguments))
        child = self._take_child()
        try:
            is_value, value = child.call(message, self._timeout)
        except CallTimeout as error:
            child.end()
            logger.warning("%s: %s; its process has been ended", name, error)
            raise
        except (EOFError, OSError) as error:
            raise RewardError(f"the process of the score function {child.death()}") from error
        self._idle.put(child)
        if not is_value:
            raise value
        return value

    def _take_child(self) -> _Child:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return _Child(self._function)


class _Child:
    """One process, which ends when nobody holds its connection any more."""

    _starting = threading.Lock()

    def __init__(self, function: bytes) -> None:
        context = multiprocessing.get_context("forkserver")
        with self._starting:  # multiprocessing starts one at a time
            context.set_forkserver_preload(["caldera.reward.child"])
            self._connection: Connection
            self._connection, theirs = context.Pipe()
            self._process: BaseProcess = context.Process(
                target=serve_calls, args=(theirs, function), daemon=True
            )
            start_without_main(self._process)
            theirs.close()
        self._is_ready = False

    def call(self, message: bytes, timeout: float | None) -> tuple[bool, Any]:
        if not self._is_ready:
            self._receive(SECONDS_TO_START)
            self._is_ready = True
        self._connection.send_bytes(message)
        is_value, value = pickle.loads(self._receive(timeout))
        return is_value, value

    def _receive(self, timeout: float | None) -> bytes:
        if not self._connection.poll(timeout):
            assert timeout is not None, "without a limit it waits"
            raise CallTimeout(timeout)
        return self._connection.recv_bytes()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def death(self) -> str:
        """The end of a process that does not reply any more."""
        self._process.join(SECONDS_TO_DIE)
        status = self._process.exitcode
        self.end()
        if status is not None and status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"
