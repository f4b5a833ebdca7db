"""Programs of the model's own, on a server that speaks Sandbox Fusion's protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from caldera.errors import ConfigError
from caldera.tools.base import ToolLimits, read_options, require_positive
from caldera.tools.programs import ProgramOutcome, Programs, ProgramTool
from caldera.tools.schemas import OpenAIFunctionToolSchema

__all__ = ["SandboxFusionTool"]


@dataclass(frozen=True)
class SandboxFusionOptions:
    sandbox_fusion_url: str
    default_timeout: float = 30.0
    """Seconds that a program may run."""
    default_language: str = "python"
    memory_limit_mb: int = 1024
    enable_global_rate_limit: bool = True
    """False: `rate_limit` does not hold."""

    def __post_init__(self) -> None:
        require_positive("default_timeout", self.default_timeout)
        require_positive("memory_limit_mb", self.memory_limit_mb, is_count=True)
        if not isinstance(self.enable_global_rate_limit, bool):
            raise ConfigError(
                f"config.enable_global_rate_limit={self.enable_global_rate_limit!r} "
                "must be true or false"
            )
        if not str(self.sandbox_fusion_url).startswith(("http://", "https://")):
            raise ConfigError(
                f"config.sandbox_fusion_url={self.sandbox_fusion_url!r} must be the address of an "
                "HTTP server"
            )
        if self.default_language != "python":
            raise ConfigError(f"config.default_language={self.default_language!r} must be python")


class SandboxFusionTool(ProgramTool):
    """Runs a program on a server. One that is busy or down is asked again a few times."""

    described = "Runs a Python program and shows what it prints. Nothing is kept between calls."
    # The client that asks the server has timeouts and attempts of its own.
    default_limits = ToolLimits(timeout=None, num_workers=10, rate_limit=10)

    def __init__(
        self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        self.options = read_options(SandboxFusionOptions, config, type(self).__name__)
        super().__init__(config, tool_schema)
        if not self.options.enable_global_rate_limit:
            self.limits = replace(self.limits, rate_limit=None)

    def run_program(self, programs: Programs, code: str) -> ProgramOutcome:
        options = self.options
        return programs.run_at(
            options.sandbox_fusion_url, code, options.default_timeout, options.memory_limit_mb
        )
