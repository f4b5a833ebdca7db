"""Whether this thread computes exactly: what `caldera.models.exact` switches, and kernels ask."""

from __future__ import annotations

import threading

_state = threading.local()


def in_exactness() -> bool:
    return getattr(_state, "active", False)


def set_exactness(active: bool) -> None:
    _state.active = active
