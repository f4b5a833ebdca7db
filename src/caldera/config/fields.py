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
from keyword import iskeyword
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
        return getattr(self, _field_name(name)) if name in self else default

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, _field_name(name))

    def __contains__(self, name: object) -> bool:
        return _field_name(str(name)) in getattr(self, "__dataclass_fields__", {})


def key_name(field: Field) -> str:
    """What the key of a field is called: `class_` is the field of `class`, a word of Python's."""
    return field.name.removesuffix("_")


def _field_name(key: str) -> str:
    return f"{key}_" if iskeyword(key) else key


def field_path(key: str) -> str:
    """The fields that lead to a dotted key."""
    return ".".join(map(_field_name, key.split(".")))


def option(
    default: T,
    *,
    unit: str = "",
    choices: tuple[Any, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    spellings: Mapping[Any, Any] | None = None,
) -> T:
    """A key with its unit and the values it takes; `spellings` are other words for some of them."""
    metadata = {"unit": unit, "choices": choices, "minimum": minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata=metadata | {"spellings": spellings or {}})


def precision(default: T, *, short: bool = False) -> T:
    """The key of a precision, which verl's users write long or short."""
    names = {"fp32": "float32", "bf16": "bfloat16"}
    spellings = {full: name for name, full in names.items()} if short else names
    return option(default, choices=tuple(spellings.values()), spellings=spellings)


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


def check_console_metrics(value: object) -> list[str] | None:
    """The words and patterns of `trainer.console_metrics`."""
    key = "trainer.console_metrics"
    patterns = None if value is None else as_list(key, value)
    for pattern in patterns or ():
        if pattern not in ("short", "all") and not set(pattern) & set("/*?"):
            raise ConfigError(
                f"{key}={shown(value)}: takes short, all, or patterns of metrics such as "
                "[short,critic/*]"
            )
    return patterns


def shown(value: Any) -> str:
    """A value as messages show it."""
    return "null" if value is None else repr(value)


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Field, Any]]:
    """Every leaf key of a config as (dotted key, field, value).

    A group that follows another one is a leaf: its keys are those of the other.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        key = f"{prefix}{key_name(field)}"
        if dataclasses.is_dataclass(value) and not isinstance(field.default, str):
            yield from walk(value, f"{key}.")
        else:
            yield key, field, value


def use_one_spelling(config: Any) -> None:
    """Replace every value by the one word that its key has for it."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            use_one_spelling(value)
        elif isinstance(value, str) and value in field.metadata.get("spellings", {}):
            setattr(config, field.name, field.metadata["spellings"][value])


def check_values(config: Any) -> None:
    """Every value is one that its key takes, or the first that is not raises."""
    for key, field, value in walk(config):
        meta = field.metadata
        if "refused" in meta:
            _check_refused(config, key, field, value)
        if meta.get("choices") and value is not None and value not in meta["choices"]:
            words = [*meta["choices"], *meta.get("spellings", {})]
            known = ", ".join(str(word) for word in words)
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
    for name in field_path(key).split("."):
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
