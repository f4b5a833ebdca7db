"""Programmatic dependent launch (PDL): a kernel begins before the one ahead of it has ended."""

from __future__ import annotations

from collections.abc import Mapping

# Triton is about to change its default for products and sums in one instruction.
UNCHAINED: Mapping[str, int] = {"CHAINED": 0, "enable_fp_fusion": True}
CHAINED: Mapping[str, int] = {**UNCHAINED, "CHAINED": 1, "launch_pdl": True}
"""It starts before the one ahead of it has ended, and lets the next one start at once."""
CHAINED_LATE: Mapping[str, int] = {**CHAINED, "CHAINED": 2}
"""The same, but the next one starts when this one has read what it needs."""
