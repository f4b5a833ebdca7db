"""Data sets ready to train on: from raw files or the hub to verl's row schema."""

from __future__ import annotations

# Importing a preparer registers it.
from caldera.data.prepare import hh_rlhf, mathematics, programming, search_qa
from caldera.data.prepare.check import FileCheck, check_file
from caldera.data.prepare.preparer import (
    PREPARERS,
    HubTable,
    Preparer,
    Source,
    register_preparer,
    rl_row,
)
from caldera.data.prepare.run import LengthLimit, prepare

__all__ = [
    "PREPARERS",
    "FileCheck",
    "HubTable",
    "LengthLimit",
    "Preparer",
    "Source",
    "check_file",
    "hh_rlhf",
    "mathematics",
    "prepare",
    "programming",
    "register_preparer",
    "rl_row",
    "search_qa",
]
