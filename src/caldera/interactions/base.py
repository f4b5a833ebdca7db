"""The contract of an interaction."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from caldera.errors import ConfigError

__all__ = ["BaseInteraction", "Reply"]

Message = dict[str, Any]
Reply = tuple[bool, str, float | None, dict[str, Any]]
"""(whether the conversation is over, the answer, the score of the policy's turn or None if it has
none, anything else)."""


class BaseInteraction(ABC):
    """Answers a policy. One object serves all trajectories of its process, by their instances."""

    timeout: float | None = 600.0
    """Seconds that an answer may take, by `timeout` of the config; None: any time."""
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
        """Answer the last of the messages, which is the policy's."""

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """The score of a conversation."""
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
    """What the policy said last."""
    said = [message for message in messages if message["role"] == "assistant"]
    return str(said[-1]["content"]) if said else ""
