"""Triton's kernels without a GPU: `make kernels` runs them in Triton's interpreter.

The interpreter is chosen by TRITON_INTERPRET=1, which must be set before Triton is first imported.
Without it there is nothing to collect here. What has the fixture `device` also runs on a GPU:

    pytest tests/kernels/test_sampler_kernels.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob: list[str] = []
if not IS_INTERPRETED:
    collect_ignore_glob += ["test_pdl_steps.py", "test_head_kernels.py"]
    if not torch.cuda.is_available():
        collect_ignore_glob += ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if IS_INTERPRETED else "cuda")


if IS_INTERPRETED:
    import numpy as np
    from triton.runtime import interpreter

    def _dot_in_one_order(
        self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> Any:
        """`tl.dot` whose sums are taken in the order of their terms, whatever the tile's shape.

        The interpreter calls NumPy's BLAS, which on some processors adds up in another order for
        another shape. Kernels of exact mode are tested to the bit.
        """
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        total = np.zeros_like(d.data)
        for term in range(left.shape[-1]):
            total += left[..., :, term, None] * right[..., None, term, :]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = _dot_in_one_order
