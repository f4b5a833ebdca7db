"""The program's side of function calls: it computes values and is never told what is expected."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any, BinaryIO

from caldera.sandbox.inside.wire import decode, encode

OPERATIONS: dict[str, Callable[..., Any]] = {"getattr": getattr, "setattr": setattr}


class Missing(NameError):
    """The program does not define a name that it is asked for."""


def answer_calls(names: dict[str, Any], requests: BinaryIO, replies: BinaryIO) -> None:
    """Call what each line asks for, until the other side closes."""
    kept: list[Any] = []  # values that are not plain data stay here, and the other side refers

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    def find(reference: Any) -> Any:
        if isinstance(reference, dict):
            return OPERATIONS[reference["operation"]]
        return kept[reference] if isinstance(reference, int) else resolve(names, reference)

    for line in requests:
        request = json.loads(line)
        reply: dict[str, Any]
        try:
            function: Callable[..., Any] = find(request["function"])
            arguments = decode(request["arguments"], find)
            keywords = decode(request["keywords"], find)
            reply = {"value": encode(function(*arguments, **keywords), keep)}
        except Missing as error:
            reply = {"missing": str(error)}
        except BaseException as error:  # noqa: BLE001 -- the other side hears of it
            reply = {"raised": type(error).__name__, "message": _text_of(error)}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def resolve(names: dict[str, Any], dotted: str) -> Any:
    """A name of the program's. In `Solution.solve` a class stands for an instance of it."""
    first, *rest = dotted.split(".")
    if first not in names:
        raise Missing(first)
    value = names[first]
    for attribute in rest:
        value = getattr(value() if inspect.isclass(value) else value, attribute)
    return value


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 -- a __str__ of the program's
        return ""
