"""Custom functions and classes where a registered name is expected: `file.py:name`."""

from __future__ import annotations

from typing import Any, TypeVar

from caldera.data.importing import load_class, load_object
from caldera.errors import ConfigError
from caldera.registry import Registry

T = TypeVar("T")


def registered_or_own(registry: Registry[T], name: str) -> T:
    """The registered thing of that name, or the one that `path:name` points at.

    The path is `/x/y.py`, `file:///x/y.py` or `pkg://a.b.c`. What it points at is registered under
    the whole text, so that whoever looks it up later in this process finds it.
    """
    path, _, attribute = name.rpartition(":")
    if name not in registry and (path.endswith(".py") or path.startswith("pkg://")):
        registry.register(name)(load_object(path, attribute, registry.kind))
    return registry[name]


def chosen_class(registry: Registry[Any], name: str | None, base: type[T], key: str) -> type[T]:
    """The class that a key names: a registered or a custom one, derived from the base; by default
    the base itself."""
    if name is None:
        return base
    if name not in registry:
        try:
            return load_class(name, base, key)
        except ConfigError as error:
            known = ", ".join(registry.names())
            raise ConfigError(f"{error}, or a registered {registry.kind} ({known})") from error
    chosen: type[Any] = registry[name]
    if not issubclass(chosen, base):
        raise ConfigError(
            f"{key}={name!r}: is {chosen.__qualname__}, which is not derived from "
            f"{base.__qualname__}"
        )
    return chosen
