"""Caldera: reinforcement learning of language models."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caldera.protocol import DataProto

__all__ = ["DataProto", "__version__"]

__version__ = "0.1.0"

# OpenMP reads this when torch is first imported. Threads that wait for each other spin for
# milliseconds by default, which on a machine with anything else to do is time that they lose.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def __getattr__(name: str) -> Any:
    """DataProto brings torch along, for which `caldera train --help` need not wait."""
    if name != "DataProto":
        raise AttributeError(f"module 'caldera' has no attribute {name!r}")
    from caldera.protocol import DataProto

    return DataProto
