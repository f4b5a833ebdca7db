"""Tools of an agent, the formats in which it calls them, and how calls are run."""

from __future__ import annotations

from caldera.tools.base import BaseTool, ToolResponse
from caldera.tools.function_tool import function_tool
from caldera.tools.schemas import OpenAIFunctionToolSchema

__all__ = ["BaseTool", "OpenAIFunctionToolSchema", "ToolResponse", "function_tool"]
