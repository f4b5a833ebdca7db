"""Functions of the user's own where a registered name is expected: `file.py:function`."""

from __future__ import annotations

from typing import TypeVar

from caldera.data.importing import load_object
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
