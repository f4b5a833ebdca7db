"""The limits of a program, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from caldera.errors import ConfigError

Status = Literal["ok", "failed", "timed out", "out of memory", "output limit"]


@dataclass(frozen=True)
class Limits:
    """Of one program, all its processes together where nothing else is said."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 10  # of each process
    memory_mb: int = 512  # address space of each process, and resident memory of all together
    disk_mb: int = 32  # in its working folder
    processes: int = 16  # threads count as well
    open_files: int = 64  # of each process
    output_bytes: int = 2**20  # on standard output, and as much on standard error

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(f"Limits.{field.name}={value!r} must be greater than 0")
            if field.name != "wall_seconds" and not isinstance(value, int):
                raise ConfigError(f"Limits.{field.name}={value!r} must be an integer")


@dataclass(frozen=True)
class Outcome:
    """How a program ended. Only "ok" is good: it ended by itself, with the exit status 0."""

    status: Status
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None  # minus the number of the signal that ended it; None: was killed
    seconds: float = 0.0
    value: Any = None  # what the function of `Sandbox.call` returned
    raised: str | None = None  # the exception of `Sandbox.call`'s function or of a test

    @property
    def ok(self) -> bool:
        return self.status == "ok"
