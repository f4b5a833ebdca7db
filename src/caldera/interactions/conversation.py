"""A trajectory's conversation with an interaction; its errors become replies, too."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from caldera.errors import ConfigError, DataError
from caldera.interactions.base import BaseInteraction, Message

__all__ = ["Conversation"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
MISTAKES_OF_THE_RUN = (ConfigError, DataError)
"""Errors in its files; no reply mends that."""


class Conversation:
    """The turns of one trajectory with one interaction."""

    def __init__(
        self, interaction: BaseInteraction, request_id: str, row: Mapping[str, Any]
    ) -> None:
        """`row` holds the `interaction_kwargs`."""
        self.interaction = interaction
        self.failures: dict[str, int] = {}
        """How often something went wrong, by outcome: error or timeout."""
        self._kwargs: Mapping[str, Any] = row["interaction_kwargs"]
        self._instance = request_id
        self._has_begun = False

    async def begin(self) -> bool:
        """False if the interaction cannot begin: this trajectory has none."""
        start = self.interaction.start_interaction
        begun = await self._try(start, self._instance, **self._kwargs)
        if isinstance(begun, _Failed):
            return False
        self._instance, self._has_begun = begun, True
        return True

    async def answer(self, messages: Sequence[Message]) -> tuple[bool, str, float | None]:
        """(whether it is over, the reply to the last message, that message's score or None)."""
        answered = await self._try(self._answer, messages)
        if isinstance(answered, _Failed):
            return False, f"Error when answering: {answered.told}", 0.0
        return answered

    async def end(self) -> None:
        """Let go of the conversation, if there is one."""
        if self._has_begun:
            await self._try(self.interaction.finalize_interaction, self._instance)

    async def _answer(self, messages: Sequence[Message]) -> tuple[bool, str, float | None]:
        reply = await self.interaction.generate_response(self._instance, messages, **self._kwargs)
        if not isinstance(reply, tuple | list) or len(reply) != 4:
            raise TypeError(
                f"{type(self.interaction).__name__}.generate_response must return (is over, text, "
                f"score, dict), got {reply!r:.200}"
            )
        is_over, text, score, _ = reply
        if is_over and text is None:  # nobody is going to read it
            text = ""
        if not isinstance(text, str):
            raise TypeError(f"an answer must be text, got a {type(text).__name__}")
        if score is not None and not math.isfinite(score):
            raise ValueError(f"the score {score} is not finite")
        return bool(is_over), text, None if score is None else float(score)

    async def _try(
        self, work: Callable[..., Awaitable[Result]], *args: Any, **kwargs: Any
    ) -> Result | _Failed:
        limit = asyncio.timeout(self.interaction.timeout)
        try:
            async with limit:
                return await work(*args, **kwargs)
        except MISTAKES_OF_THE_RUN:
            raise
        except asyncio.CancelledError as error:
            if _is_cancelled():  # and not just something that the interaction itself waited for
                raise
            return self._failed(error, "error", "it was given up")
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- of the interaction's own code
            if limit.expired():
                told = f"there was no answer within {self.interaction.timeout:g} s"
                return self._failed(error, "timeout", told)
            return self._failed(error, "error", str(error) or type(error).__name__)

    def _failed(self, error: BaseException, outcome: str, told: str) -> _Failed:
        self.failures[outcome] = self.failures.get(outcome, 0) + 1
        _report(self.interaction, error)
        return _Failed(told)


class _Failed:
    def __init__(self, told: str) -> None:
        self.told = told


def _is_cancelled() -> bool:
    """Whether somebody has cancelled the task that runs."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


_reported: set[tuple[str, type[BaseException]]] = set()


def _report(interaction: BaseInteraction, error: BaseException) -> None:
    """Tell the user the first time, who can mend it."""
    if (interaction.name, type(error)) not in _reported:
        _reported.add((interaction.name, type(error)))
        logger.warning(
            "the interaction %s failed, and the trajectory goes on; more of this kind are not "
            "logged",
            interaction.name,
            exc_info=error,
        )
