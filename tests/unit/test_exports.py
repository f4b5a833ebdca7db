"""The public names: what is added or taken away here is a change of the API."""

from __future__ import annotations

import subprocess
import sys

import caldera
import caldera.api

PUBLIC = [
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


def test_the_public_names_are_these_and_are_there() -> None:
    assert caldera.__all__ == PUBLIC
    assert {name for name in PUBLIC if getattr(caldera, name, None) is None} == set()
    assert set(PUBLIC) <= set(dir(caldera))


def test_importing_caldera_imports_no_torch() -> None:
    code = "import caldera, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
