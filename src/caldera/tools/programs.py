"""What tools that run programs need of a sandbox, which belongs to another room."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from caldera.errors import ConfigError
from caldera.tools.base import BaseTool, ToolResponse
from caldera.tools.schemas import OpenAIFunctionToolSchema
from caldera.tools.threads import in_thread

__all__ = ["NOTHING_PRINTED", "ProgramOutcome", "ProgramTool", "Programs"]

NOTHING_PRINTED = "no stdout here"


class ProgramOutcome(Protocol):
    """How a program ended."""

    @property
    def status(self) -> str:
        """ "ok", or what was wrong: "failed", "timed out", "out of memory", "output limit"."""

    @property
    def stdout(self) -> str: ...

    @property
    def stderr(self) -> str: ...


class Programs(Protocol):
    """Runs Python programs where they can do no harm; each call returns when its program ended."""

    def run(self, program: str, seconds: float, memory_mb: int) -> ProgramOutcome:
        """In the sandbox of this machine."""
        ...

    def run_at(self, url: str, program: str, seconds: float, memory_mb: int) -> ProgramOutcome:
        """On a server that speaks Sandbox Fusion's protocol."""
        ...


class ProgramTool(BaseTool):
    """Runs the program that a model writes, and shows it what was printed."""

    programs: Programs | None = None
    """Given by whoever loads the tool."""
    described: ClassVar[str]

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema or OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": "code_interpreter",
                    "description": self.described,
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "code": {"type": "string", "description": "A whole Python program."}
                        },
                        "required": ["code"],
                    },
                },
            }
        )

    def run_program(self, programs: Programs, code: str) -> ProgramOutcome:
        """Called in a thread."""
        raise NotImplementedError

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        if self.programs is None:
            raise ConfigError(f"{self.name} was made without a sandbox: load it by load_tools")
        code = parameters["code"]
        outcome = await in_thread(self.run_program, self.programs, code)
        text = outcome.stdout + outcome.stderr
        if outcome.status not in ("ok", "failed"):  # nothing that it wrote itself says so
            text = f"{text}\nThe program was ended: {outcome.status}".strip()
        return ToolResponse(text or NOTHING_PRINTED), None, {"status": outcome.status}
