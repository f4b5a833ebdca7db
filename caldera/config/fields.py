"""How a config key is declared: its default, the values it takes, and whether it is honoured.

Every key is a dataclass field with its default, and its docstring stands under it. `option`
declares a key that is honoured, `refused` one that is understood and cannot be honoured yet: it
keeps its default, and any other value is an error that says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from caldera.errors import ConfigError, UnsupportedError

T = TypeVar("T")


def option(
    default: T,
    *,
    choices: tuple[Any, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
) -> T:
    """A key with the values it takes."""
    metadata = {"choices": choices, "minimum": minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata=metadata)


def refused(default: T, reason: str) -> T:
    """A key that is understood and honoured only at its default."""
    return dataclasses.field(default=default, metadata={"refused": reason, "default": default})


def listed(*items: T) -> list[T]:
    """A list-valued key."""
    return dataclasses.field(default_factory=lambda: list(items))


def mapping() -> dict[str, Any]:
    """A key whose value is a free dictionary."""
    return dataclasses.field(default_factory=dict)


def nested(factory: Callable[[], T]) -> T:
    """A group of keys."""
    return dataclasses.field(default_factory=factory)


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Every leaf key of a config as (dotted key, field, value)."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        key = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{key}.")
        else:
            yield key, field, value


def check_values(config: Any) -> None:
    """Every value is one that its key takes, or the first that is not raises."""
    for key, field, value in walk(config):
        meta = field.metadata
        if "refused" in meta and value != meta["default"]:
            raise UnsupportedError(f"{key}={value!r} is not supported: {meta['refused']}")
        if meta.get("choices") and value is not None and value not in meta["choices"]:
            known = ", ".join(str(choice) for choice in meta["choices"])
            raise ConfigError(f"{key}={value!r}: takes one of {known}")
        _check_range(key, meta.get("minimum"), meta.get("maximum"), value)


def _check_range(key: str, minimum: float | None, maximum: float | None, value: Any) -> None:
    if value is None or isinstance(value, (str, list, dict)):
        return
    if minimum is not None and value < minimum:
        raise ConfigError(f"{key}={value!r}: must be at least {minimum:g}")
    if maximum is not None and value > maximum:
        raise ConfigError(f"{key}={value!r}: must be at most {maximum:g}")
