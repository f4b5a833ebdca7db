"""The contract of an interaction, and a trajectory's talk with one."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

from caldera.data.importing import load_class
from caldera.errors import ConfigError, DataError
from caldera.storage.paths import read_yaml
from caldera.threads import is_cancelled

Message = dict[str, Any]
Reply = tuple[bool, str, float | None, dict[str, Any]]
"""(whether the conversation is over, the reply, the score of the policy's turn or None if it has
none, anything else)."""


class BaseInteraction(ABC):
    """Responds to a policy. One object serves all trajectories of its process, as instances."""

    timeout: float | None = 600.0
    """Seconds that a reply may take, by `timeout` of the config; None: any time."""
    options: ClassVar[tuple[str, ...] | None] = None
    """Keys that the config of this very class may have beside those of every interaction; None:
    any."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.name = str(config.get("name", "interaction"))
        own = vars(type(self)).get("options")
        if own is not None:
            _check_known(config, ("timeout", *own), self.name)
        if "timeout" in config:
            self.timeout = _seconds(config["timeout"], self.name)

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a conversation; `kwargs` are the row's `interaction_kwargs`."""
        return instance_id or uuid.uuid4().hex

    @abstractmethod
    async def generate_response(
        self, instance_id: str, messages: Sequence[Message], **kwargs: Any
    ) -> Reply:
        """Reply to the last of the messages, which is the policy's."""

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """The score of a conversation; for `generate_response`, nobody else calls it."""
        return 0.0

    async def finalize_interaction(  # noqa: B027 -- most have nothing to let go of
        self, instance_id: str, **kwargs: Any
    ) -> None:
        """End a conversation, however it went."""


def _check_known(config: Mapping[str, Any], keys: Sequence[str], name: str) -> None:
    for key in config:
        if key not in keys and key != "name":
            raise ConfigError(f"{name}: config.{key} is unknown; there are {', '.join(keys)}")


def _seconds(given: Any, name: str) -> float | None:
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if given is not None and not (is_number and given > 0):
        raise ConfigError(f"{name}: config.timeout={given!r} must be a number above 0, or null")
    return None if given is None else float(given)


def last_answer(messages: Sequence[Message]) -> str:
    """The policy's last message."""
    said = [message for message in messages if message["role"] == "assistant"]
    return str(said[-1]["content"]) if said else ""


# ---- Interactions from their YAML file

KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
ENTRY_KEYS = ("name", "class_name", "config")
SUFFIX = "Interaction"


def load_interactions(path: str | None) -> dict[str, BaseInteraction]:
    """The interactions of a file, by name; none where there is no file."""
    if path is None:
        return {}
    read = read_yaml(path, KEY)
    entries = read.get("interaction") if isinstance(read, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{KEY}={path}: must hold a list under 'interaction'")
    interactions: dict[str, BaseInteraction] = {}
    for number, entry in enumerate(entries):
        interaction = _load(entry, f"{KEY}={path}: interaction[{number}]")
        if interaction.name in interactions:
            raise ConfigError(f"{KEY}={path}: the name {interaction.name!r} is there twice")
        interactions[interaction.name] = interaction
    return interactions


def _load(entry: Any, where: str) -> BaseInteraction:
    if not isinstance(entry, Mapping) or not set(entry) <= set(ENTRY_KEYS):
        raise ConfigError(f"{where}: takes a mapping of {', '.join(ENTRY_KEYS)}, got {entry!r}")
    if not isinstance(entry.get("class_name"), str):
        raise ConfigError(
            f"{where}.class_name is missing, such as my.module.MyInteraction or "
            "path/to/file.py:MyInteraction"
        )
    key = f"{where}.class_name"
    kind = load_class(entry["class_name"], BaseInteraction, key)  # type: ignore[type-abstract]
    if inspect.isabstract(kind):
        raise ConfigError(f"{key}={entry['class_name']}: it has no generate_response")
    config = {} if entry.get("config") is None else entry["config"]
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}.config={config!r}: takes a mapping")
    name = entry.get("name") or kind.__name__.removesuffix(SUFFIX).lower()
    try:
        return kind({**config, "name": name})
    except ConfigError as error:
        raise type(error)(f"{where}: {error}") from error


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
        try:
            self._instance = await self._try(start, self._instance, **self._kwargs)
        except _Failed:
            return False
        self._has_begun = True
        return True

    async def answer(self, messages: Sequence[Message]) -> tuple[bool, str, float | None]:
        """(whether it is over, the reply to the last message, that message's score or None)."""
        try:
            return await self._try(self._answer, messages)
        except _Failed as failed:
            return False, f"Error when answering: {failed}", 0.0

    async def end(self) -> None:
        """Let go of the conversation, if there is one."""
        if self._has_begun:
            with suppress(_Failed):
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
    ) -> Result:
        limit = asyncio.timeout(self.interaction.timeout)
        try:
            async with limit:
                return await work(*args, **kwargs)
        except MISTAKES_OF_THE_RUN:
            raise
        except asyncio.CancelledError as error:
            if is_cancelled():  # and not just something that the interaction itself waited for
                raise
            outcome, told = "error", "it was given up"
            cause: BaseException = error
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- of the interaction's own code
            outcome, told, cause = "error", str(error) or type(error).__name__, error
            if limit.expired():
                outcome = "timeout"
                told = f"there was no answer within {self.interaction.timeout:g} s"
        self.failures[outcome] = self.failures.get(outcome, 0) + 1
        _report(self.interaction, cause)
        raise _Failed(told)


class _Failed(Exception):
    """The interaction did; the text is for the policy."""


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
