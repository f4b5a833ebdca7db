"""`caldera doctor`: what of this machine works, and the command that repairs what does not."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from rich.table import Table
from rich.text import Text

from caldera import __version__
from caldera.errors import CalderaError
from caldera.installation import checkout, install_command, version_line
from caldera.storage.paths import cache_folder
from caldera.tracking.progress import print_line, print_table
from caldera.trainer.entry import OptionsCommand, text_parser

# ---- Asking an interpreter, this one or another, which libraries it can import

SECONDS_TO_IMPORT = 300.0
QUESTION = """
import importlib, importlib.metadata, json, sys
answer = {}
for name, module in json.loads(sys.argv[1]).items():
    try:
        answer[name] = [importlib.metadata.version(name), None]
    except importlib.metadata.PackageNotFoundError:
        continue
    try:
        importlib.import_module(module)
    except BaseException as error:
        first = (str(error).splitlines() or [""])[0]
        answer[name][1] = type(error).__name__ + ": " + first
print()
print(json.dumps({"python": sys.version.split()[0], "found": answer}))
"""
"""It is run in a process of its own: a library may end the process that imports it."""


@dataclass(frozen=True)
class Library:
    """A library that is installed."""

    version: str
    problem: str | None
    """Why it cannot be imported; None: it can."""


@dataclass(frozen=True)
class Answer:
    """What an interpreter said of itself, or why it said nothing."""

    python: str = ""
    libraries: Mapping[str, Library] | None = None
    problem: str | None = None


def ask(python: Path | str, modules: Mapping[str, str]) -> Answer:
    """The libraries that an interpreter has, of those that are named: distribution -> module."""
    command = [str(python), "-W", "ignore", "-c", QUESTION, json.dumps(dict(modules))]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_IMPORT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Answer(problem=str(error))
    if said.returncode != 0:
        words = (said.stderr.splitlines() or ["no word"])[-1]
        return Answer(problem=f"it ended with status {said.returncode}: {words}")
    told = json.loads(said.stdout.rstrip().splitlines()[-1])
    found = {name: Library(*given) for name, given in told["found"].items()}
    return Answer(told["python"], found)


def ask_each(python: Path | str, modules: Mapping[str, str]) -> dict[str, Library]:
    """The same; where they cannot all be imported in one process, one by one."""
    together = ask(python, modules)
    if together.libraries is not None:
        return dict(together.libraries)
    found: dict[str, Library] = {}
    for name, module in modules.items():
        alone = ask(python, {name: module})
        if alone.libraries is None:
            found[name] = Library("installed", alone.problem)
        else:
            found |= alone.libraries
    return found


OLDEST_PYTHON = (3, 11)
SECONDS_TO_CONNECT = 3.0


@dataclass(frozen=True)
class Wanted:
    """A library, by the name of its distribution elsewhere."""

    module: str
    extra: str | None = None
    """The extra of Caldera's that brings it; None: every run imports it."""
    oldest: tuple[int, ...] = ()

    @property
    def fix(self) -> str:
        return install_command(self.extra)


WANTED = {
    "torch": Wanted("torch", oldest=(2, 11)),
    "transformers": Wanted("transformers", oldest=(5, 12)),
    "tensordict": Wanted("tensordict"),
    "tokenizers": Wanted("tokenizers"),
    "safetensors": Wanted("safetensors"),
    "hydra-core": Wanted("hydra"),
    "omegaconf": Wanted("omegaconf"),
    "numpy": Wanted("numpy"),
    "pyarrow": Wanted("pyarrow"),
    "fsspec": Wanted("fsspec"),
    "peft": Wanted("peft", "lora"),
    "math-verify": Wanted("math_verify", "math"),
    "datasets": Wanted("datasets", "hub"),
    "liger-kernel": Wanted("liger_kernel", "liger"),
    "ray": Wanted("ray", "ray"),
    "megatron-core": Wanted("megatron.core", "megatron"),
}


def check_python() -> Iterator[Finding]:
    """Caldera, and the interpreter."""
    folder = Path(__file__).parents[1]
    yield ok("Caldera", f"{version_line(__version__)} in {folder}")
    told = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        fix = f"make demo PYTHON=/path/to/python{oldest}"
        yield broken("Python", f"{told}: {oldest} or newer is needed", fix)
    else:
        yield ok("Python", told)


def check_libraries(found: Mapping[str, Library]) -> Iterator[Finding]:
    """What every run imports, and what some do."""
    for name, wanted in WANTED.items():
        asked_for = name == "ray" and bool(os.environ.get("RAY_ADDRESS"))
        is_needed = wanted.extra is None or asked_for
        yield library(name, found.get(name), wanted, is_needed)


def library(name: str, found: Library | None, wanted: Wanted, is_needed: bool) -> Finding:
    """One that is installed must be usable, whether it is needed or not."""
    if found is None:
        tell = broken if is_needed else absent
        return tell(name, "not installed", wanted.fix)
    if found.problem:
        return broken(name, f"{found.version}, cannot be imported: {found.problem}", wanted.fix)
    if numbers(found.version) < wanted.oldest:
        oldest = ".".join(map(str, wanted.oldest))
        return broken(name, f"{found.version}: {oldest} or newer is needed", wanted.fix)
    return ok(name, found.version)


def check_cluster() -> Iterator[Finding]:
    """The Ray cluster that RAY_ADDRESS names, if it does."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    fix = "ray start --head on its first node; `unset RAY_ADDRESS` runs on this machine alone"
    try:
        with socket.create_connection((host, int(port)), SECONDS_TO_CONNECT):
            yield ok("Ray cluster", f"RAY_ADDRESS={address} answers")
    except (OSError, ValueError, OverflowError) as error:
        yield broken("Ray cluster", f"RAY_ADDRESS={address}: {error}", fix)


def numbers(version: str) -> tuple[int, ...]:
    """The leading whole numbers of a version: 2.13.0+cpu -> (2, 13, 0)."""
    found: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


GIB = 2**30
ENOUGH_DISK = 20 * GIB
LEAST_DISK = GIB
ENOUGH_SHARED = GIB
LEAST_SHARED = 64 * 2**20
SHARED_MEMORY = Path("/dev/shm")
YES = ("1", "ON", "YES", "TRUE")


def check_disk() -> Iterator[Finding]:
    """Where runs write, and where models and fetched files are kept."""
    places = {
        "disk here": Path.cwd(),
        "disk of the cache": cache_folder(),
        "disk of temporary files": Path(tempfile.gettempdir()),
    }
    for name, folder in places.items():
        mend = "CALDERA_CACHE=FOLDER names another" if "cache" in name else "df -h; du -xhd1 /"
        yield room(name, folder, ENOUGH_DISK, LEAST_DISK, mend)


def check_shared_memory() -> Iterator[Finding]:
    """What batches travel through between processes."""
    fix = "mount -o remount,size=8G /dev/shm; of a container: docker run --shm-size=8g"
    if not SHARED_MEMORY.is_dir():
        yield broken("shared memory", f"{SHARED_MEMORY} is not there", fix)
    else:
        yield room("shared memory", SHARED_MEMORY, ENOUGH_SHARED, LEAST_SHARED, fix)


def room(name: str, folder: Path, enough: int, least: int, fix: str) -> Finding:
    """Free space of a folder that may not be there yet, and whether one may write there."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        return broken(name, f"{folder}: {error.strerror}", fix)
    told = f"{free / GIB:.1f} GiB free in {folder}"
    if free < least:
        return broken(name, told, fix)
    return doubtful(name, told, fix) if free < enough else ok(name, told)


def check_ports() -> Iterator[Finding]:
    """Ranks and servers meet on ports of this machine, under its name."""
    fix = "allow connections to 127.0.0.1 in the firewall or the container"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), SECONDS_TO_CONNECT):
                yield ok("ports", f"a server on 127.0.0.1:{port} could be reached")
    except OSError as error:
        yield broken("ports", f"no server can be reached on 127.0.0.1: {error}", fix)
    host = socket.gethostname()
    try:
        yield ok("host name", f"{host} is {socket.gethostbyname(host)}")
    except OSError as error:
        mend = f"echo '127.0.0.1 {host}' >> /etc/hosts"
        yield doubtful("host name", f"{host} has no address: {error}", mend)


def check_hub() -> Iterator[Finding]:
    """Whether models can come from the hub."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in YES:
            yield ok("hub", f"{name}={os.environ[name]}: models come from folders and the cache")
            return
    from huggingface_hub.constants import ENDPOINT

    endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT)
    parts = urlsplit(endpoint)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    fix = "export HF_HUB_OFFLINE=1 where models are folders; HF_ENDPOINT=URL names a mirror"
    try:
        with socket.create_connection((parts.hostname or "", port), SECONDS_TO_CONNECT):
            yield ok("hub", f"{endpoint} can be reached")
    except OSError as error:
        yield doubtful("hub", f"{endpoint} cannot be reached: {error}", fix)


def check_sandbox() -> Iterator[Finding]:
    """Whether programs of models can be run, and shut off by what."""
    from caldera.sandbox import Sandbox

    fix = "apt-get install bubblewrap; or sysctl kernel.unprivileged_userns_clone=1"
    try:
        with Sandbox(slots=1) as sandbox:
            answer = sandbox.run("print(6 * 7)")
    except CalderaError as error:
        yield doubtful("sandbox", f"code cannot be scored: {str(error).splitlines()[0]}", fix)
        return
    if answer.stdout.strip() != "42":
        yield doubtful("sandbox", f"a program of one line ended as {answer.status}", fix)
    else:
        has = "" if shutil.which("bwrap") else "; the program bwrap is not here"
        yield ok("sandbox", f"programs are isolated by {sandbox.isolation}{has}")


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


# ---- What the doctor has to say of one thing


class State(StrEnum):
    OK = "ok"
    ABSENT = "absent"
    """Not there, and nothing asks for it."""
    DOUBTFUL = "doubtful"
    """It works, but a run may come to its limits."""
    BROKEN = "broken"
    """Something that is needed, or was asked for, does not work."""


@dataclass(frozen=True)
class Finding:
    """One thing, how it is, and what to do about it."""

    name: str
    state: State
    told: str
    fix: str | None = None
    """A command to run, or a sentence; of all that is not well."""

    def __post_init__(self) -> None:
        assert self.state is State.OK or self.fix, "what is not well has a fix"


Check = Callable[[], Iterable[Finding]]


def ok(name: str, told: str) -> Finding:
    return Finding(name, State.OK, told)


def absent(name: str, told: str, fix: str) -> Finding:
    return Finding(name, State.ABSENT, told, fix)


def doubtful(name: str, told: str, fix: str) -> Finding:
    return Finding(name, State.DOUBTFUL, told, fix)


def broken(name: str, told: str, fix: str) -> Finding:
    return Finding(name, State.BROKEN, told, fix)


HELP = """\
Look at this machine: Python and libraries, CUDA and its driver, samplers, Ray,
Megatron, disk, shared memory, ports, the hub, the sandbox. Tells of each what
works, and of the rest how to mend it. Ends with status 1 if something that is
needed is broken; what is only absent or doubtful does not count.

  caldera doctor
  caldera doctor --engine-python /opt/vllm/bin/python
  caldera doctor --json
"""
TO_COMPUTE = ("torch", "transformers", "tensordict", "omegaconf", "hydra-core")
"""Libraries without which neither a GPU nor a sampler can be tried."""
MACHINE: tuple[Check, ...] = (
    check_cluster,
    check_disk,
    check_shared_memory,
    check_ports,
    check_hub,
    check_sandbox,
)
COLOURS = {State.OK: "green", State.ABSENT: "dim", State.DOUBTFUL: "yellow", State.BROKEN: "red"}


def parser() -> argparse.ArgumentParser:
    """What reads the command line."""
    parser = text_parser("caldera doctor", HELP)
    parser.add_argument(
        "--engine-python",
        type=Path,
        metavar="PYTHON",
        help="look for vLLM and SGLang in this interpreter; one that is not there is a finding",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def work(options: argparse.Namespace) -> int:
    """Look at everything; returns the exit status."""
    findings = examine(options.engine_python)
    if options.json:
        told = [asdict(finding) for finding in findings]
        sys.stdout.write(json.dumps({"findings": told, "ok": not is_broken(findings)}) + "\n")
    else:
        show(findings)
    return int(is_broken(findings))


def examine(engine_python: Path | None) -> list[Finding]:
    """All that is found, in the order in which one thing needs another."""
    modules = {name: wanted.module for name, wanted in WANTED.items()}
    found = ask_each(sys.executable, modules | ENGINES)
    findings = [*check_python(), *check_libraries(found)]
    if not any(f.state is State.BROKEN for f in findings if f.name in TO_COMPUTE):
        findings += [*tried(check_cuda), *tried(check_native)]
    if engine_python is None:
        findings += check_engines(found)
    else:
        findings += check_engine_python(engine_python)
    for check in MACHINE:
        findings += tried(check)
    return findings


def tried(check: Check) -> list[Finding]:
    """What a check finds; one that cannot import or read what it needs has found just that."""
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except (ImportError, OSError) as error:
        name = getattr(check, "__name__", "").removeprefix("check_").replace("_", " ")
        first = (str(error).splitlines() or [""])[0]
        told = f"could not be looked at: {type(error).__name__}: {first}"
        findings.append(broken(name, told, "mend the libraries that are broken, and look again"))
    return findings


def is_broken(findings: Iterable[Finding]) -> bool:
    return any(finding.state is State.BROKEN for finding in findings)


def show(findings: Sequence[Finding]) -> None:
    """Print a table, then what to do about all that is not well, the broken first."""
    table = Table("what", "state", "found", show_lines=False)
    for finding in findings:
        told = Text(finding.state, style=COLOURS[finding.state])
        table.add_row(Text(finding.name), told, Text(finding.told))
    print_table(table)
    for state in (State.BROKEN, State.DOUBTFUL, State.ABSENT):
        for finding in findings:
            if finding.state is state:
                print_line(f"{finding.name} ({state}): {finding.fix}")
    broken = sum(finding.state is State.BROKEN for finding in findings)
    print_line("Nothing that is needed is broken." if not broken else f"{broken} broken.")


DOCTOR = OptionsCommand(parser, work)
