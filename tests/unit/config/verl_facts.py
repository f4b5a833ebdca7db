"""The tables of verl's keys, and Caldera's defaults beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from caldera.config import PPOTrainerConfig, compose_config, config_to_dict, known_keys
from caldera.config.migrate import is_target

FOLDER = Path(__file__).parents[2] / "data" / "verl_config"
FILES = ("ppo_trainer", "ppo_megatron_trainer")
ABSENT = "(no such key)"


@cache
def facts(generation: str, name: str) -> dict[str, Any]:
    """Every key of a file with its default, references unresolved."""
    lines = (FOLDER / f"config_{generation}_{name}.tsv").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("\t") for line in lines)
    return {key: json.loads(default) for key, default in pairs}


def tree_of(values: dict[str, Any]) -> DictConfig:
    """Dotted keys as one tree."""
    tree = OmegaConf.create({})
    for key, value in values.items():
        OmegaConf.update(tree, key, value, force_add=True)
    return tree


def without_targets(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_targets(v) for k, v in value.items() if not is_target(k)}
    return value


def verl_defaults(generation: str, name: str) -> Iterator[tuple[str, Any]]:
    """Every key but the names of classes, with its default resolved."""
    values = facts(generation, name)
    resolved = OmegaConf.to_container(tree_of(values), resolve=True)
    for key, raw in values.items():
        if not is_target(key):
            yield key, None if raw == "???" else without_targets(look_up(resolved, key))


@cache
def caldera_defaults(name: str) -> dict[str, Any]:
    return config_to_dict(compose_config([], name, None, PPOTrainerConfig))


def look_up(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if part not in tree:
            return ABSENT
        tree = tree[part]
    return tree


def is_known(key: str) -> bool:
    """A key, a group, or below a free dictionary."""
    keys = known_keys()
    parts = key.split(".")
    above = (".".join(parts[:length]) for length in range(1, len(parts)))
    is_group = any(name.startswith(f"{key}.") for name in keys)
    return key in keys or is_group or any(keys.get(group) for group in above)


def as_override(key: str, value: Any) -> str:
    """The override that gives the key this value."""
    return f"{key}={_as_text(value)}"


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_as_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_as_text(item) for item in value) + "]"
    if isinstance(value, str):
        return f"'{value}'"
    return json.dumps(value)
