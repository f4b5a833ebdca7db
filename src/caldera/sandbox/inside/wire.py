"""Values of Python as JSON, both ways, without running anything that the sender chose."""

from __future__ import annotations

import base64
import builtins
from collections.abc import Callable
from typing import Any

Reference = Callable[[Any], Any]

MAX_DEPTH = 100
CONTAINERS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
# Values that JSON does not know. Integers go in base 16: Python limits the digits of base 10.
LEAVES: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "int": (int, hex, lambda text: int(text, 16)),
    "float": (float, repr, float),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "range": (range, lambda r: [r.start, r.stop, r.step], lambda ends: range(*ends)),
}


def encode(value: Any, refer: Reference, depth: int = MAX_DEPTH) -> Any:
    """`value` as JSON. What is not plain data goes through `refer`, which makes JSON of it."""
    if depth == 0:
        raise ValueError("the value is nested too deeply")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str(value)
    for name, (kind, write, _) in LEAVES.items():
        if isinstance(value, kind):
            return {name: write(value)}
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return {name: [encode(item, refer, depth - 1) for item in value]}
    if isinstance(value, dict):
        pairs = [[encode(part, refer, depth - 1) for part in pair] for pair in value.items()]
        return {"dict": pairs}
    if isinstance(value, type):
        name = value.__name__
        return {"type": name} if vars(builtins).get(name) is value else {"reference": refer(value)}
    return {"reference": refer(value)}


def _built_in_type(name: Any) -> type:
    kind = vars(builtins).get(name)
    if not isinstance(kind, type):
        raise ValueError(f"not a built-in type: {name!r}")
    return kind


def decode(data: Any, refer: Reference) -> Any:
    """What `encode` wrote; `refer` makes something of its references.

    Other data raises ValueError, TypeError or RecursionError.
    """
    if data is None or isinstance(data, bool | str):
        return data
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("not an encoded value")
    ((name, content),) = data.items()
    if name in LEAVES:
        return LEAVES[name][2](content)
    if name in CONTAINERS:
        return CONTAINERS[name](decode(item, refer) for item in content)
    if name == "dict":
        return {decode(key, refer): decode(item, refer) for key, item in content}
    if name == "reference":
        return refer(content)
    if name == "type":
        return _built_in_type(content)
    raise ValueError(f"not an encoded value: {name!r}")
