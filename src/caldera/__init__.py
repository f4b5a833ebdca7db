"""Caldera: reinforcement learning of language models."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caldera.api import Run, StopTraining, dpo, evaluate, generate, grpo, ppo, sft
    from caldera.protocol import DataProto
    from caldera.tools import function_tool as tool

__all__ = [
    "DataProto",
    "Run",
    "StopTraining",
    "__version__",
    "dpo",
    "evaluate",
    "generate",
    "grpo",
    "ppo",
    "sft",
    "tool",
]

__version__ = "0.1.0"

# OpenMP reads this when torch is first imported. Threads that wait for each other spin for
# milliseconds by default, which on a machine with anything else to do is time that they lose.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


_HOMES = {
    "DataProto": ("caldera.protocol", "DataProto"),
    "tool": ("caldera.tools", "function_tool"),
    **{
        name: ("caldera.api", name)
        for name in ("Run", "StopTraining", "dpo", "evaluate", "generate", "grpo", "ppo", "sft")
    },
}
"""Where the public names are: they bring torch along, for which `caldera --help` need not wait."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'caldera' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
