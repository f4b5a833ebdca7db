"""Memory of the C library, given back to the machine."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def trim_heap() -> None:
    """Return freed memory to the system; the C library would keep it for its next use."""
    with suppress(OSError, AttributeError):  # C libraries other than glibc do it by themselves
        ctypes.CDLL(None).malloc_trim(0)
