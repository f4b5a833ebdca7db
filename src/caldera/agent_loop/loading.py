"""Which agent loops there are, and what they share."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import caldera.agent_loop.react_agent
import caldera.agent_loop.sampling
import caldera.agent_loop.tool_agent  # noqa: F401 -- all register themselves
from caldera.agent_loop.base import AGENT_LOOPS, AgentLoopBase, MakeLoop
from caldera.data.importing import load_class
from caldera.errors import ConfigError
from caldera.storage.paths import read_yaml

KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
GIVEN = (
    "trainer_config",
    "server_manager",
    "tokenizer",
    "processor",
    "dataset_cls",
    "dataset_config",
)
"""The arguments that every loop is made with."""


def read_loops(path: str | None) -> dict[str, MakeLoop]:
    """The loops of a file, a list of `{name, _target_, ...}`: the rest goes to the constructor."""
    if path is None:
        return {}
    entries = read_yaml(path, KEY)
    if not isinstance(entries, list):
        raise ConfigError(f"{KEY}={path}: must hold a list of mappings with name and _target_")
    loops: dict[str, MakeLoop] = {}
    for number, entry in enumerate(entries):
        name, make = _read(entry, f"{KEY}={path}: [{number}]")
        if name in loops:
            raise ConfigError(f"{KEY}={path}: the name {name!r} is there twice")
        loops[name] = make
    return loops


def find_loop(name: str, own: Mapping[str, MakeLoop]) -> MakeLoop:
    """The loop of that name: one of the file's, else a registered one."""
    return own[name] if name in own else AGENT_LOOPS[name]


def loop_class(make: MakeLoop) -> type[AgentLoopBase]:
    """The class of which loops are made."""
    kind: Any = make.func if isinstance(make, partial) else make
    assert isinstance(kind, type) and issubclass(kind, AgentLoopBase)
    return kind


def _read(entry: Any, where: str) -> tuple[str, MakeLoop]:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}={entry!r}: takes a mapping with name and _target_")
    for key in ("name", "_target_"):
        if not isinstance(entry.get(key), str):
            raise ConfigError(f"{where}.{key} is missing, or is no text")
    extras = {str(key): value for key, value in entry.items() if key not in ("name", "_target_")}
    key = f"{where}._target_"
    kind = load_class(entry["_target_"], AgentLoopBase, key)  # type: ignore[type-abstract]
    kind.check_options(extras, where)
    _check_constructor(kind, extras, where)
    return entry["name"], partial(kind, **extras)


def _check_constructor(kind: type[AgentLoopBase], extras: dict[str, Any], where: str) -> None:
    """A loop can be made of its entry, and reads what stands there."""
    if inspect.isabstract(kind):
        raise ConfigError(f"{where}._target_: {kind.__name__} has no run")
    if extras and kind.__init__ is AgentLoopBase.__init__:
        raise ConfigError(f"{where}: {kind.__name__} takes no {', '.join(extras)}")
    try:
        inspect.signature(kind).bind(**dict.fromkeys(GIVEN), **extras)
    except TypeError as error:
        raise ConfigError(f"{where}: {kind.__name__} cannot be made of this: {error}") from error
