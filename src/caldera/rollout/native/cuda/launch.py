"""Programmatic dependent launch (PDL): a kernel begins before the one ahead of it has ended."""

from __future__ import annotations

from collections.abc import Mapping

# Triton is about to change its default for products and sums in one instruction.
NO_PDL: Mapping[str, int] = {"PDL": 0, "enable_fp_fusion": True}
PDL: Mapping[str, int] = {**NO_PDL, "PDL": 1, "launch_pdl": True}
"""It starts before the one ahead of it has ended, and lets the next one start at once."""
PDL_LATE: Mapping[str, int] = {**PDL, "PDL": 2}
"""The same, but the next one starts when this one has read what it needs."""
