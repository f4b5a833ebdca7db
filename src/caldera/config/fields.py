"""How a config key is declared: its default, the values it takes, and whether it is honoured.

Every key is a dataclass field with its default, and its docstring stands under it. `option`
declares a key that is honoured, `refused` one that is understood and cannot be honoured yet: it
keeps its default, and any other value is an error that says why.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from caldera.errors import ConfigError, UnsupportedError

T = TypeVar("T")

Field = dataclasses.Field[Any]


@dataclasses.dataclass
class ConfigGroup:
    """A group of keys, whose values can be had by name too.

    Extensions written for verl ask so: `config.get("n", 1)`, `config["n"]`, `"n" in config`.
    """

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name) if name in self else default

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in getattr(self, "__dataclass_fields__", {})


def option(
    default: T,
    *,
    unit: str = "",
    choices: tuple[Any, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
) -> T:
    """A key with its unit and the values it takes."""
    metadata = {"unit": unit, "choices": choices, "minimum": minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata=metadata)


def refused(default: T, reason: str, *, met: tuple[Any, ...] = ()) -> T:
    """A key that is understood and honoured only at its default, and at the values in `met`,
    which ask for what happens anyway. A default that refers to another key follows it."""
    metadata = {"refused": reason, "met": met}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def listed(*items: T) -> list[T]:
    """A list-valued key."""
    return dataclasses.field(default_factory=lambda: list(items))


def mapping(**items: Any) -> dict[str, Any]:
    """A key whose value is a free dictionary."""
    return dataclasses.field(default_factory=lambda: dict(items))


def nested(factory: Callable[[], T]) -> T:
    """A group of keys."""
    return dataclasses.field(default_factory=factory)


def default_of(field: Field) -> Any:
    """A field's default, made anew where it is mutable."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def as_list(key: str, value: object) -> list[str]:
    """One text is a list of one."""
    items = value if isinstance(value, list) else [value]
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) < len(items):
        raise ConfigError(f"{key}={shown(value)}: takes text or a list of texts, such as [a,b]")
    return texts


def shown(value: Any) -> str:
    """A value as messages show it."""
    return "null" if value is None else repr(value)


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Field, Any]]:
    """Every leaf key of a config as (dotted key, field, value).

    A group that follows another one is a leaf: its keys are those of the other.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        key = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(field.default, str):
            yield from walk(value, f"{key}.")
        else:
            yield key, field, value


def check_values(config: Any) -> None:
    """Every value is one that its key takes, or the first that is not raises."""
    for key, field, value in walk(config):
        meta = field.metadata
        if "refused" in meta:
            _check_refused(config, key, field, value)
        if meta.get("choices") and value is not None and value not in meta["choices"]:
            known = ", ".join(str(choice) for choice in meta["choices"])
            raise ConfigError(f"{key}={value!r}: takes one of {known}")
        _check_number(key, meta, value)


def default_in(config: Any, field: Field) -> Any:
    """A field's default; where it follows another key, that key's value in the config."""
    default = default_of(field)
    if isinstance(default, str) and default.startswith("${"):
        return _look_up(config, default.strip("${}"))
    return default


def _check_refused(config: Any, key: str, field: Field, value: Any) -> None:
    if value != default_in(config, field) and value not in field.metadata["met"]:
        reason = field.metadata["refused"]
        raise UnsupportedError(f"{key}={shown(value)} is not supported: {reason}")


def _look_up(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _check_number(key: str, meta: Mapping[str, Any], value: Any) -> None:
    if not isinstance(value, (int, float)):
        return
    minimum, maximum = meta.get("minimum"), meta.get("maximum")
    low = -math.inf if minimum is None else minimum
    high = math.inf if maximum is None else maximum
    if low <= value <= high:  # which no comparison with nan is
        return
    unit = f" ({meta['unit']})" if meta.get("unit") else ""
    if math.isnan(value):
        raise ConfigError(f"{key}=nan: takes a number{unit}")
    if maximum is None:
        raise ConfigError(f"{key}={value!r}: must be at least {low:g}{unit}")
    if minimum is None:
        raise ConfigError(f"{key}={value!r}: must be at most {high:g}{unit}")
    raise ConfigError(f"{key}={value!r}: must be from {low:g} to {high:g}{unit}")
