"""The sandbox as tools see it, which cannot import this room."""

from __future__ import annotations

import atexit
import math
import os
from functools import cache

from caldera.reward.sandbox.client import SandboxFusionClient
from caldera.reward.sandbox.limits import Limits, Outcome
from caldera.reward.sandbox.pool import Sandbox

__all__ = ["SandboxPrograms"]


class SandboxPrograms:
    """`caldera.tools.programs.Programs`; it can be sent to other processes."""

    def run(self, program: str, seconds: float, memory_mb: int) -> Outcome:
        return _sandbox().run(program, limits=_limits(seconds, memory_mb))

    def run_at(self, url: str, program: str, seconds: float, memory_mb: int) -> Outcome:
        return _client(url).run(program, limits=_limits(seconds, memory_mb))


def _limits(seconds: float, memory_mb: int) -> Limits:
    return Limits(wall_seconds=seconds, cpu_seconds=math.ceil(seconds), memory_mb=memory_mb)


@cache
def _client(url: str) -> SandboxFusionClient:
    return SandboxFusionClient(url)


@cache
def _sandbox() -> Sandbox:
    """Started by the first program, ended with the process."""
    sandbox = Sandbox(slots=os.cpu_count() or 1)
    atexit.register(sandbox.close)
    return sandbox
