"""How long threads spin that wait for each other is told before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LOOK = (
    "import sys, os, caldera; assert 'torch' not in sys.modules; "
    "print(os.environ.get('GOMP_SPINCOUNT'))"
)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_what_openmp_is_told(given: dict[str, str], found: str) -> None:
    own = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP", "OMP"))}
    told = subprocess.run(
        [sys.executable, "-c", LOOK], env=own | given, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == found
