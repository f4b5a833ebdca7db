"""Score functions of the user's own, plain or async."""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from caldera.config.reward import CustomRewardFunctionConfig
from caldera.data.importing import load_object
from caldera.errors import ConfigError

__all__ = ["ScoreFunction", "await_all", "get_custom_reward_fn"]

ScoreFunction = Callable[..., Any]
"""`compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)`; returns a
number or a dict with `score`, or is an async function that does."""


def get_custom_reward_fn(config: CustomRewardFunctionConfig) -> ScoreFunction | None:
    """The function that the configuration names, or None if it names none.

    Its `reward_kwargs` override the arguments of every call.
    """
    if config.path is None:
        return None
    function = load_object(config.path, config.name, "custom_reward_function")
    if not callable(function):
        raise ConfigError(
            f"custom_reward_function.name={config.name!r} in {config.path} must be a function, "
            f"got {type(function).__name__}"
        )
    reward_kwargs = dict(config.reward_kwargs)

    @functools.wraps(function)
    def with_reward_kwargs(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **(kwargs | reward_kwargs))

    return with_reward_kwargs


def await_all(results: Sequence[Any]) -> list[Any]:
    """The results, with what is awaitable awaited, all at once; an exception takes its place."""
    pending = [index for index, result in enumerate(results) if inspect.isawaitable(result)]
    awaited = list(results)
    if not pending:
        return awaited

    async def gather() -> list[Any]:
        return await asyncio.gather(*(results[i] for i in pending), return_exceptions=True)

    for index, result in zip(pending, _async_runner().run(gather()), strict=True):
        awaited[index] = result
    return awaited


@functools.cache
def _async_runner() -> asyncio.Runner:
    """One event loop for the whole process.

    A client that a score function keeps between calls holds connections that belong to the loop
    that opened them; with a loop a batch they would be dead in the second batch.
    """
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner
