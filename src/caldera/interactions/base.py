"""The contract of an interaction."""

from __future__ import annotations

import inspect
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from caldera.data.importing import load_class
from caldera.errors import ConfigError
from caldera.storage.paths import read_yaml

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
