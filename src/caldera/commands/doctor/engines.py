"""The GPU, and what samples."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from caldera.commands.doctor.command import Finding, absent, broken, doubtful, ok
from caldera.commands.doctor.software import Library, ask
from caldera.errors import CalderaError
from caldera.installation import checkout, install_command

ENGINES = {"vllm": "vllm", "sglang": "sglang"}
"""Distribution -> module."""
TESTED = {"vllm": "0.32.0", "sglang": "0.5.20"}
"""What Caldera's tests run with. Their interfaces change with each minor version."""
SECONDS_TO_ASK = 30.0


def check_cuda() -> Iterator[Finding]:
    """The driver, and whether torch can use it."""
    import torch

    driver, built_for = driver_version(), torch.version.cuda
    if driver is None and not torch.cuda.is_available():
        fix = "nothing, for runs on the CPU; else install NVIDIA's driver"
        yield absent("CUDA", "this machine has no NVIDIA driver: runs use the CPU", fix)
        return
    if built_for is None:
        fix = "pip install --force-reinstall the torch for CUDA that fits the driver"
        yield broken("CUDA", f"driver {driver}, but torch {torch.__version__} is for CPUs", fix)
        return
    if not torch.cuda.is_available():
        fix = f"a driver for CUDA {built_for} or newer; check CUDA_VISIBLE_DEVICES and nvidia-smi"
        yield broken("CUDA", f"driver {driver}: torch for CUDA {built_for} finds no GPU", fix)
        return
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)


def _gpu(index: int) -> Finding:
    import torch

    name = torch.cuda.get_device_name(index)
    try:
        ones = torch.ones(64, 64, device=f"cuda:{index}")
        is_right = float((ones @ ones).sum()) == 64**3
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        fix = "nvidia-smi shows who else uses it; a reboot mends a GPU that has fallen off"
        return broken(f"GPU {index}", f"{name}: {str(error).splitlines()[0]}", fix)
    told = f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if not is_right:
        return broken(f"GPU {index}", f"{told}; it computes wrong numbers", "nvidia-smi -q -d ECC")
    if free < total / 2:
        return doubtful(f"GPU {index}", told, "nvidia-smi shows whose processes use it")
    return ok(f"GPU {index}", told)


def driver_version() -> str | None:
    """The version of NVIDIA's driver; None: there is none that answers."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS_TO_ASK)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.split() if answer.returncode == 0 else []
    return lines[0] if lines else None


def check_native() -> Iterator[Finding]:
    """The native sampler answers, on the device that a run would use."""
    import torch
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM

    from caldera.config import RolloutConfig
    from caldera.models.attention import ATTENTION
    from caldera.rollout.base import Request, SamplingParams
    from caldera.rollout.native.engine import NativeRollout

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    shape._attn_implementation = ATTENTION
    fix = install_command() if checkout() else "pip install --upgrade torch transformers"
    try:
        with torch.random.fork_rng():
            model: nn.Module = LlamaForCausalLM(shape)
            model.to(device)
        sampler = NativeRollout(RolloutConfig(max_model_len=16), model, device)
        request = Request([1, 2, 3], SamplingParams(4, temperature=0), 0)
        (answer,) = sampler.generate([request])
    except (CalderaError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        yield broken("native sampler", f"on {device.type}: {type(error).__name__}: {error}", fix)
        return
    yield ok("native sampler", f"answered {len(answer.token_ids)} tokens on {device.type}")
    if device.type == "cpu":
        yield _kernels()


def _kernels() -> Finding:
    """What makes sampling on a CPU fast, and needs a compiler."""
    import torch

    from caldera.rollout.native.cpu.kernels import cpu_kernels, find_compiler, why_not

    head_dim = 32
    name, fix = "kernels for the CPU", "apt-get install g++ (without it, sampling is slower)"
    reason = why_not(torch.float32, head_dim)
    if reason is not None:
        return absent(name, reason, fix)
    if cpu_kernels(head_dim) is None:
        return doubtful(name, f"{find_compiler()} could not compile them", fix)
    return ok(name, f"compiled by {find_compiler()}")


def check_engines(found: Mapping[str, Library]) -> Iterator[Finding]:
    """vLLM and SGLang in this interpreter, where they may be."""
    for name, version in TESTED.items():
        fix = (
            f"python -m venv FOLDER && FOLDER/bin/pip install {name}=={version}, or for a CPU "
            f"python scripts/engine_venv.py {name} FOLDER in a checkout; then "
            "actor_rollout_ref.rollout.engine_python=FOLDER/bin/python"
        )
        there = found.get(name)
        if there is None:
            yield absent(name, f"not installed; {version} fits", fix)
        else:
            yield _engine(name, name, there, fix)


def check_engine_python(python: Path) -> Iterator[Finding]:
    """The same in another interpreter, which must have one of them."""
    answer = ask(python, ENGINES)
    fix = f"{python} -m pip install vllm=={TESTED['vllm']}"
    if answer.libraries is None:
        yield broken("engine's Python", f"{python}: {answer.problem}", "--engine-python=PYTHON")
        return
    if not answer.libraries:
        told = f"{python} (Python {answer.python}) has neither vllm nor sglang"
        yield broken("engine's Python", told, fix)
    for name, there in answer.libraries.items():
        fix = f"{python} -m pip install {name}=={TESTED[name]}"
        yield _engine(name, f"{name} of {python}", there, fix)


def _engine(engine: str, name: str, there: Library, fix: str) -> Finding:
    if there.problem:
        return broken(name, f"{there.version}, cannot be imported: {there.problem}", fix)
    tested = TESTED[engine]
    if there.version.split(".")[:2] != tested.split(".")[:2]:
        return doubtful(name, f"{there.version}, where {tested} is what it is tested with", fix)
    return ok(name, there.version)
