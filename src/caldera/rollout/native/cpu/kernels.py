"""`kernels.cpp`, compiled for this machine when it is first needed.

PyTorch and Triton ask for a C++ compiler, too, when they compile. Without one, the sampler computes
the same by PyTorch's operations.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from caldera.rollout.native.backbone import CODE_FOLDER
from caldera.rollout.native.blocks import PAGE_SIZE

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
TILE = 32
"""Columns of a small matrix that lie together."""
COMPILERS = ("g++", "clang++", "c++")


class StepArguments(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        *((name, c_int64) for name in ("tokens", "parts", "table_width", "threads")),
        *((name, c_void_p) for name in ("slots", "first", "count", "place", "owner", "tables")),
    )


class LayerArguments(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value")),
        *((name, c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, c_void_p) for name in ("cos", "sin", "query_norm", "key_norm")),
        *((name, c_void_p) for name in ("keys", "values", "out")),
        *((name, c_int64) for name in ("query_heads", "key_heads", "window")),
        *((name, c_float) for name in ("scale", "head_epsilon")),
    )


class Matrices(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv_proj", "bias", "o_proj", "gate", "up", "down")),
        *((name, c_int64) for name in ("hidden", "inner")),
        *((name, c_float) for name in ("first_epsilon", "second_epsilon")),
        ("values", c_void_p),
    )


class CpuKernels:
    """The compiled library, for heads of one size, in float32."""

    def __init__(self, library: ctypes.CDLL) -> None:
        step, layer, matrices = map(POINTER, (StepArguments, LayerArguments, Matrices))
        self.attend = _function(library.caldera_attend, step, layer)
        """Keep the layer's keys and values, and let the step's tokens attend."""
        self.run_layer = _function(library.caldera_run_layer, step, layer, matrices)
        """All that a layer does with the values of the step's tokens."""
        self._normalise = _function(
            library.caldera_normalise, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int64
        )

    def normalise(self, values: Tensor, epsilon: float) -> Tensor:
        """values (T, H), each row over the root of its mean square."""
        out = torch.empty_like(values)
        self._normalise(
            values.data_ptr(), out.data_ptr(), *values.shape, epsilon, torch.get_num_threads()
        )
        return out


def _function(function: Any, *types: Any) -> Callable[..., None]:
    function.argtypes, function.restype = types, None
    return cast(Callable[..., None], function)


def why_not(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why a model cannot have kernels here, or None."""
    if dtype != torch.float32:
        return f"{dtype} is not float32"
    if head_dim % 8:
        return f"heads of {head_dim} are no multiple of 8"
    if platform.system() != "Linux":
        return f"{platform.system()} is not Linux"
    if find_compiler() is None:
        return f"there is no C++ compiler ({', '.join(COMPILERS)}, or the variable CXX)"
    return None


def find_compiler() -> str | None:
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, (named,) if named else COMPILERS)), None)


@functools.cache
def cpu_kernels(head_dim: int) -> CpuKernels | None:
    """None, and a warning, if the compiler fails."""
    compiler = find_compiler()
    assert compiler is not None, "it was asked whether there is one"
    try:
        return CpuKernels(ctypes.CDLL(str(_compiled(compiler, head_dim))))
    except (subprocess.SubprocessError, OSError, RuntimeError) as error:  # as without a home
        said = getattr(error, "stderr", None)
        said = said if isinstance(said, str) and said else str(error)
        logger.warning("sampling without compiled kernels: %s: %s", compiler, said.strip()[-500:])
        return None


def _compiled(compiler: str, head_dim: int) -> Path:
    """The library, which is compiled unless it has been."""
    defined = (f"-DDIM={head_dim}", f"-DPAGE_SIZE={PAGE_SIZE}", f"-DTILE={TILE}")
    compile_ = (compiler, *FLAGS, "-fopenmp", *defined, "-c", str(SOURCE), "-o")
    link = (compiler, "-shared", *_threads_of_torch(), "-o")
    told = (SOURCE.read_text(), compile_, link, _processor())
    digest = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
    folder = CODE_FOLDER.expanduser()
    library = folder / f"cpu_kernels-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            compiled, linked = f"{aside}/kernels.o", f"{aside}/kernels.so"
            for command in ((*compile_, compiled), (*link, linked, compiled)):
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            os.replace(linked, library)
    return library


def _threads_of_torch() -> list[str]:
    """The thread pool of the library: PyTorch's own, for two sets would be in each
    other's way."""
    shipped = sorted(Path(torch.__file__).parent.glob("lib/libgomp*"))
    return ["-Wl,--no-as-needed", str(shipped[0])] if shipped else ["-fopenmp"]


def _processor() -> str:
    """The machine of the code: a home may be shared by machines that differ."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
