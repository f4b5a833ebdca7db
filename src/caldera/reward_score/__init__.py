"""Scorers that come with Caldera, one a file, chosen by a row's `data_source`."""

from __future__ import annotations

# Importing a scorer registers it.
from caldera.reward_score import (
    arithmetic,
    geo3k,
    gsm8k,
    hendrycks_math,
    math_dapo,
    prime_code,
    prime_math,
    qa_em,
    qa_em_format,
)
from caldera.reward_score.code_tests import Program, ProgramResult, RunTests
from caldera.reward_score.routing import SCORERS, Score, default_compute_score, register_scorer

__all__ = [
    "SCORERS",
    "Program",
    "ProgramResult",
    "RunTests",
    "Score",
    "arithmetic",
    "default_compute_score",
    "geo3k",
    "gsm8k",
    "hendrycks_math",
    "math_dapo",
    "prime_code",
    "prime_math",
    "qa_em",
    "qa_em_format",
    "register_scorer",
]
