"""The kernels of PDL steps are compiled for a Hopper GPU, whether or not there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_kernels_are_compiled_for_hopper(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = {line.split()[0] for line in done.stdout.splitlines()}
    assert compiled == {
        "attention_kernel", "_combine_kernel", "product_kernel", "split_k_kernel", "tile_kernel",
        "begin_kernel", "_begin_kernel", "add_norm_kernel", "gate_kernel", "_tile_kernel",
        "_choose_kernel",
    }  # fmt: skip
