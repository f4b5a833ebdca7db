"""How long and how large the requests to any HTTP server may be."""

from __future__ import annotations

__all__ = [
    "LARGE_BYTES", "MAX_REQUEST_BYTES", "SECONDS_FOR_BODY", "SECONDS_FOR_HEADERS",
    "SECONDS_TO_LINGER", "SECONDS_TO_TAKE_ANSWER", "error_text", "too_large", "too_slow",
]  # fmt: skip

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
