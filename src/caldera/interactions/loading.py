"""Interactions from their YAML file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from caldera.data.importing import load_class
from caldera.errors import ConfigError
from caldera.interactions.base import BaseInteraction
from caldera.storage.reading import read_yaml

__all__ = ["load_interactions"]

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
