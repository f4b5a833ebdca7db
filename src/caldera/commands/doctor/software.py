"""Python, the libraries that every run imports, and those that some runs do."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from caldera.commands.doctor.command import Finding, absent, broken, ok
from caldera.installation import install_command

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
    "uvicorn": Wanted("uvicorn", "serve"),
    "datasets": Wanted("datasets", "hub"),
    "liger-kernel": Wanted("liger_kernel", "liger"),
    "ray": Wanted("ray", "ray"),
    "megatron-core": Wanted("megatron.core", "megatron"),
}


def check_python() -> Iterator[Finding]:
    """The interpreter."""
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
