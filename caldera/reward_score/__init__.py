"""Scorers that come with Caldera, one a file, chosen by a row's `data_source`."""

from __future__ import annotations

# Importing a scorer registers it.
from caldera.reward_score import arithmetic, gsm8k
from caldera.reward_score.routing import SCORERS, default_compute_score, register_scorer

__all__ = ["SCORERS", "arithmetic", "default_compute_score", "gsm8k", "register_scorer"]
