"""The distribution that has the import name `verl`, without installing it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from caldera.agent_loop.base import AGENT_LOOPS
from caldera.core_algos import ADV_ESTIMATORS, POLICY_LOSSES
from caldera.registry import Registry
from caldera.reward import REWARD_MANAGERS
from caldera.tools.formats import TOOL_PARSERS

sys.path.insert(0, str(Path(__file__).parents[3] / "compat/verl/src"))

OWN = "compat_"
REGISTRIES: tuple[Registry[Any], ...] = (
    ADV_ESTIMATORS, AGENT_LOOPS, POLICY_LOSSES, REWARD_MANAGERS, TOOL_PARSERS,
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_names_are_forgotten() -> Iterator[None]:
    """Names that a test registers, which begin with `compat_`, are gone after it.

    Others stay: a module that a test is the first to import registers its own only once.
    """
    yield
    for registry in REGISTRIES:
        for name in registry:
            if name.startswith(OWN):
                del registry._items[name]
