"""Python, the libraries that every run imports, and those that some runs do."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from caldera.installation import install_command
from caldera.trainer.doctor.findings import Finding, absent, broken, ok
from caldera.trainer.doctor.interpreters import Library

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
