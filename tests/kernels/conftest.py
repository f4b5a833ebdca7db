"""Triton's kernels without a GPU: `make kernels` runs them in Triton's interpreter.

The interpreter is chosen by TRITON_INTERPRET=1, which must be set before Triton is first imported.
Without it there is nothing to collect here. What has the fixture `device` also runs on a GPU:

    pytest tests/kernels/test_sampler_kernels.py
"""

from __future__ import annotations

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob: list[str] = []
if not IS_INTERPRETED:
    collect_ignore_glob += ["test_chained.py", "test_head_kernels.py"]
    if not torch.cuda.is_available():
        collect_ignore_glob += ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if IS_INTERPRETED else "cuda")
