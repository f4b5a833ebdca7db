"""How a kernel is launched behind another, where the GPU can begin it early."""

from __future__ import annotations

from collections.abc import Mapping

UNCHAINED: Mapping[str, int] = {"CHAINED": 0}
CHAINED: Mapping[str, int] = {"CHAINED": 1, "launch_pdl": True}
"""It starts before the one ahead of it has ended, and lets the next one start at once."""
CHAINED_LATE: Mapping[str, int] = {"CHAINED": 2, "launch_pdl": True}
"""The same, but the next one starts when this one has read what it needs."""
