"""Tools that run the model's programs: in this machine's sandbox, or on a Sandbox Fusion server."""

from __future__ import annotations

import atexit
import math
import os
from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any

from caldera.errors import ConfigError
from caldera.sandbox import Limits, Outcome, Sandbox, SandboxFusionClient
from caldera.threads import in_thread
from caldera.tools.base import (
    RateOptions,
    ShippedTool,
    ToolLimits,
    ToolResponse,
    require_positive,
)
from caldera.tools.schemas import OpenAIFunctionToolSchema

NOTHING_PRINTED = "no stdout here"
DESCRIPTION = "Runs a Python program and shows what it prints. Nothing is kept between calls."


class ProgramTool(ShippedTool):
    """Runs the program that a model writes, and shows it what was printed."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema or OpenAIFunctionToolSchema.of_text(
            "code_interpreter", DESCRIPTION, "code", "A whole Python program."
        )

    def program_limits(self) -> Limits:
        seconds: float = self.options.default_timeout
        return Limits(seconds, math.ceil(seconds), self.options.memory_limit_mb)

    @abstractmethod
    def run_program(self, code: str) -> Outcome:
        """Run it to its end; called in a thread."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        outcome = await in_thread(self.run_program, parameters["code"])
        text = outcome.stdout + outcome.stderr
        if outcome.status not in ("ok", "failed"):  # its own output does not show that
            text = f"{text}\nThe program was ended: {outcome.status}".strip()
        return ToolResponse(text or NOTHING_PRINTED), None, {"status": outcome.status}


@dataclass(frozen=True)
class PythonOptions:
    default_timeout: float = 10.0
    """Seconds that a program may run."""
    memory_limit_mb: int = 512

    def __post_init__(self) -> None:
        require_positive("default_timeout", self.default_timeout)
        require_positive("memory_limit_mb", self.memory_limit_mb, is_count=True)


class PythonTool(ProgramTool):
    """Runs a program in the sandbox."""

    options_class = PythonOptions
    # Programs queue for the sandbox's slots, which has its own limits: it ends them itself.
    default_limits = ToolLimits(timeout=None, num_workers=16)

    def run_program(self, code: str) -> Outcome:
        return _sandbox().run(code, limits=self.program_limits())


@dataclass(frozen=True, kw_only=True)
class SandboxFusionOptions(RateOptions):
    sandbox_fusion_url: str
    default_timeout: float = 30.0
    """Seconds that a program may run."""
    default_language: str = "python"
    memory_limit_mb: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("default_timeout", self.default_timeout)
        require_positive("memory_limit_mb", self.memory_limit_mb, is_count=True)
        if not str(self.sandbox_fusion_url).startswith(("http://", "https://")):
            raise ConfigError(
                f"config.sandbox_fusion_url={self.sandbox_fusion_url!r} must be the address of an "
                "HTTP server"
            )
        if self.default_language != "python":
            raise ConfigError(f"config.default_language={self.default_language!r} must be python")


class SandboxFusionTool(ProgramTool):
    """Runs a program on a server. One that is busy or down is asked again a few times."""

    options_class = SandboxFusionOptions
    # The client that asks the server has its own timeouts and attempts.
    default_limits = ToolLimits(timeout=None, num_workers=10, rate_limit=10)

    def run_program(self, code: str) -> Outcome:
        return _client(self.options.sandbox_fusion_url).run(code, limits=self.program_limits())


@cache
def _client(url: str) -> SandboxFusionClient:
    return SandboxFusionClient(url)


@cache
def _sandbox() -> Sandbox:
    """Started by the first program, ended with the process."""
    sandbox = Sandbox(slots=os.cpu_count() or 1)
    atexit.register(sandbox.close)
    return sandbox
