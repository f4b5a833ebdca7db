"""The process of the prime and remote managers: one call of the function at a time."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import queue
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from caldera.errors import CalderaError, ConfigError, RewardError
from caldera.reward.custom import CustomScore
from caldera.reward.explaining import explain
from caldera.reward.scoring import attempt

READY = b"ready"
"""The first message: the function is there to be called."""


def serve_calls(connection: Connection, function: bytes) -> None:
    """Send `READY`, then serve calls: (True, the return value) or (False, a CalderaError).

    The function runs in the main thread, where it may use signals. Another listens, so that the
    process ends with the one that started it, whatever the function does.
    """
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, calls), daemon=True).start()
    loaded = attempt(_load, function)
    connection.send_bytes(READY)
    while True:
        answer = attempt(_answer, loaded, calls.get())
        if (error := answer.exception()) is not None:
            told = error if isinstance(error, CalderaError) else RewardError(explain(error))
            connection.send_bytes(pickle.dumps((False, told)))
        else:
            connection.send_bytes(answer.result())


def _load(function: bytes) -> Any:
    found = pickle.loads(function)
    if isinstance(found, CustomScore):
        try:
            _ = found.function  # its file is run now, not in the time of the first call
        except ConfigError as error:  # no mistake of the run's, which could import it
            raise RewardError(str(error)) from error
    return found


def _listen(connection: Connection, calls: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            calls.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _answer(loaded: Future[Any], arguments: bytes) -> bytes:
    returned = loaded.result()(**pickle.loads(arguments))
    if inspect.isawaitable(returned):
        returned = asyncio.run(_awaited(returned))
    return pickle.dumps((True, returned))


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
