"""Programs of the model's own, in the sandbox of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from caldera.tools.base import ToolLimits, read_options, require_positive
from caldera.tools.programs import ProgramOutcome, Programs, ProgramTool
from caldera.tools.schemas import OpenAIFunctionToolSchema

__all__ = ["PythonTool"]


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

    described = "Runs a Python program and shows what it prints. Nothing is kept between calls."
    # Programs queue for the sandbox's slots, which has its own limits: it ends them itself.
    default_limits = ToolLimits(timeout=None, num_workers=16)

    def __init__(
        self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        self.options = read_options(PythonOptions, config, type(self).__name__)
        super().__init__(config, tool_schema)

    def run_program(self, programs: Programs, code: str) -> ProgramOutcome:
        return programs.run(code, self.options.default_timeout, self.options.memory_limit_mb)
