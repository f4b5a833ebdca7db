"""JSON as clients send it."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from caldera.errors import DataError

DEEPEST = 100
"""Lists and objects within each other: what walks through a request must not run out of stack."""


def read_json(body: bytes) -> Any:
    """What a body says. DataError where that is not JSON, or would not come out as it went in:
    numbers that are infinite or none, and halves of characters."""
    try:
        text = body.decode()
        content = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        if "\\u" in text:
            json.dumps(content, ensure_ascii=False).encode()  # half a character is no text
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise DataError(f"the request is not JSON: {error}") from error
    if text.count("[") + text.count("{") > DEEPEST:
        _check_depth(content)
    return content


def read_object(body: bytes) -> dict[str, Any]:
    """What a body says, which must be an object."""
    content = read_json(body)
    if not isinstance(content, dict):
        raise DataError(f"the request must be a JSON object, not {type(content).__name__}")
    return content


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(DEEPEST + 1):
        level = [
            each
            for outer in level
            for each in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(each, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> DataError:
    return DataError(f"the request is nested deeper than {DEEPEST} lists and objects")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits:.40} is out of the range of numbers")
    return number


# ---- How long and how large the requests to any HTTP server may be

MAX_REQUEST_BYTES = 32 * 2**20
SECONDS_FOR_HEADERS = 30.0
"""From the first byte of a request, or from the connection, to the end of its headers."""
SECONDS_FOR_BODY = 120.0
SECONDS_TO_TAKE_ANSWER = 600.0
SECONDS_TO_LINGER = 5.0
"""How long a refused request is read on: a client that still sends would not see the answer."""
LARGE_BYTES = 4 * 2**20
"""Requests and answers from here on give their memory back to the machine."""


def too_large(size: int | None, most: int) -> str:
    return f"a request may have {most} bytes, not {size if size is not None else 'more'}"


def too_slow(part: str) -> str:
    """What a client hears that did not send its headers, or its body, in time."""
    seconds = SECONDS_FOR_HEADERS if part == "headers" else SECONDS_FOR_BODY
    return f"the {part} of a request must be there within {seconds:g} s"


def error_text(error: BaseException) -> str:
    """An error for a client's eyes."""
    return f"{type(error).__name__}: {error}"
