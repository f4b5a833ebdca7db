from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from caldera.errors import ConfigError
from caldera.installation import install_command
from caldera.tools.calculator import CalculatorTool
from caldera.tools.gsm8k import Gsm8kTool
from caldera.tools.loading import load_tools
from caldera.tools.programs import PythonTool

OWN = """
from caldera.tools import BaseTool, ToolResponse

class Echo(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(parameters["text"]), None, {}

class NoTool:
    pass
"""

FUNCTIONS = """
from caldera.tools import function_tool

@function_tool
def double(x: int) -> int:
    "Twice a number."
    return 2 * x

again = double

@function_tool("half")
def halve(x: int) -> float:
    return x / 2

def helper(x):
    return x
"""


def written(folder: Any, *entries: Any) -> Any:
    path = folder / "tools.yaml"
    path.write_text(json.dumps({"tools": entries}))  # which is YAML
    return str(path)


def test_tools_are_loaded_by_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_tool.py").write_text(OWN)
    schema = {
        "type": "function",
        "function": {
            "name": "echo",
            "description": "Says it again.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        },
    }
    config = {"type": "native", "timeout": 2}
    path = written(
        tmp_path,
        {"class_name": f"{tmp_path}/echo_tool.py:Echo", "config": config, "tool_schema": schema},
        {"class_name": "CalculatorTool", "config": {"type": "native"}},
        {"class_name": "caldera.tools.programs.PythonTool", "config": {"type": "native"}},
        {"class_name": "verl.tools.gsm8k_tool.Gsm8kTool", "config": {"type": "native"}},
    )
    echo, calculator, python, gsm8k = load_tools(path)
    assert (echo.name, echo.limits.timeout) == ("echo", 2)
    assert type(calculator) is CalculatorTool and type(gsm8k) is Gsm8kTool
    assert type(python) is PythonTool


def test_a_class_on_the_path_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools_of_a_user.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    function = {"name": "say", "description": ""}
    entry = {
        "class_name": "tools_of_a_user.Echo",
        "config": {"type": "native"},
        "tool_schema": {"type": "function", "function": function},
    }
    (tool,) = load_tools(written(tmp_path, entry))
    assert tool.name == "say"


def test_functions_are_loaded_once_each(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    tools = load_tools(None, str(tmp_path / "functions.py"))
    assert [tool.name for tool in tools] == ["double", "half"]
    (tmp_path / "no_functions.py").write_text("def helper(): ...")
    with pytest.raises(ConfigError, match=r"function_tool_path: .*no_functions.py"):
        load_tools(None, str(tmp_path / "no_functions.py"))


NATIVE = {"type": "native"}


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"class_name": "CalculatorTool"}, r"tools\[0\].config.type=None must be native or mcp"),
        ({"class_name": "CalculatorTool", "config": {"type": "own"}}, "config.type='own'"),
        (
            {"class_name": "Calculator", "config": NATIVE},
            r"none of the shipped tools.*file.py:MyTool",
        ),
        ({"config": NATIVE}, "class_name=None"),
        ({"class_name": "no_module_of_mine.Tool", "config": NATIVE}, "cannot be imported"),
        ({"class_name": "caldera.tools.ToolResponse", "config": NATIVE}, "derived from BaseTool"),
        ({"class_name": "CalculatorTool", "config": NATIVE, "schema": {}}, "schema is unknown"),
        ({"class_name": "CalculatorTool", "config": NATIVE, "mcp": {}}, "needs config.type=mcp"),
        (
            {"class_name": "CalculatorTool", "config": NATIVE, "tool_schema": {"function": {}}},
            r"tools\[0\].tool_schema.function.name",
        ),
        (
            {"class_name": "CalculatorTool", "config": {**NATIVE, "timeout": -1}},
            r"tools\[0\]: config.timeout=-1",
        ),
        ({"class_name": "caldera.tools.BaseTool", "config": NATIVE}, "it has no execute"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, entry: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        load_tools(written(tmp_path, entry))
    assert "multi_turn.tool_config_path" in str(error.value)


def test_mcp_tools_need_their_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    servers = {"mcp_servers_config_path": "servers.json"}
    entry = {"class_name": "MCPTool", "config": {"type": "mcp"}, "mcp": servers}
    with pytest.raises(ConfigError, match=re.escape(install_command("mcp"))):
        load_tools(written(tmp_path, entry))


@pytest.mark.parametrize("text", ["tools: []", "other: 1", "- 1", "tools: [", "tools: ${a}"])
def test_files_that_hold_no_tools(tmp_path: Path, text: str) -> None:
    (tmp_path / "tools.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"tools\.yaml"):
        load_tools(str(tmp_path / "tools.yaml"))
    with pytest.raises(ConfigError, match="does not exist"):
        load_tools(str(tmp_path / "other.yaml"))


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"tools\.yaml cannot be read"):
        load_tools(str(tmp_path / "tools.yaml"))
