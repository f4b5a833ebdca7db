"""vLLM in the process that samples, without `engine_python`."""

from __future__ import annotations

import os
import platform
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.engine_trials import python_of

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
START = """
import platform, runpy, sys
if platform.python_version_tuple()[:2] != tuple(sys.argv[1].split(".")[:2]):
    sys.exit(77)
sys.path.append(sys.argv[2])
runpy.run_path(sys.argv[3], run_name="__main__")
"""
"""What Caldera needs and vLLM's environment has not, it finds in this one: behind its own."""


def test_same_tokens_and_new_weights() -> None:
    run = subprocess.run(
        [
            python_of("vllm"), "-c", START, platform.python_version(),
            sysconfig.get_path("platlib"), str(ROOT / "tests/vllm/in_process.py"),
        ],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    if run.returncode == 77:
        pytest.skip("vLLM's Python is of another version")
    assert run.returncode == 0, run.stderr[-3000:]
