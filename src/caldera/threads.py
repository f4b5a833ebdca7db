"""Code of others, awaited: blocking functions, and whether it was cancelled or only gave up."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_thread(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """The function's result, from a separate thread.

    Not `asyncio.to_thread`: that has few threads, and one that hangs would keep the process from
    ending. How many run at the same time is the caller's matter.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if future.done():  # given up meanwhile
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, failure = None, None
        try:
            result = context.run(function, *args, **kwargs)
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- raised where it is awaited
            failure = _raisable(error)
        with suppress(RuntimeError):  # the event loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name=getattr(function, "__name__", None), daemon=True).start()
    return await future


def _raisable(error: BaseException) -> Exception:
    """The error, unless a future cannot raise it, or it would end the event loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def is_cancelled() -> bool:
    """Whether somebody has cancelled the task that runs."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
