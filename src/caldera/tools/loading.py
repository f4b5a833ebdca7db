"""The tools of a run: classes that a YAML file names, and functions of a Python file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from caldera.data.importing import load_class, load_module
from caldera.errors import ConfigError
from caldera.storage import local_path
from caldera.tools.base import BaseTool
from caldera.tools.function_tool import tools_of
from caldera.tools.schemas import OpenAIFunctionToolSchema

OWN = "as my.module.MyTool or path/to/file.py:MyTool"
TOOLS = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
FUNCTIONS = "actor_rollout_ref.rollout.multi_turn.function_tool_path"
SHIPPED = {
    "CalculatorTool": "calculator",
    "Gsm8kTool": "gsm8k",
    "MCPTool": "mcp",
    "PythonTool": "programs",
    "SandboxFusionTool": "programs",
    "SearchTool": "search",
}
OF_VERL = {"MCPBaseTool": "MCPTool", "MCPSearchTool": "MCPTool"}


def load_tools(
    tool_config_path: str | None,
    function_tool_path: str | None = None,
) -> list[BaseTool]:
    """The tools of both files, in their order."""
    tools: list[BaseTool] = []
    if tool_config_path:
        entries = _entries(tool_config_path)
        for number, entry in enumerate(entries):
            where = f"{TOOLS}: {tool_config_path}: tools[{number}]"
            tools += _tools_of(entry, Path(tool_config_path), where)
    if function_tool_path:
        found = tools_of(load_module(function_tool_path, FUNCTIONS))
        if not found:
            raise ConfigError(
                f"{FUNCTIONS}: {function_tool_path} has no function with the decorator "
                "@function_tool of caldera.tools"
            )
        tools += found
    return tools


def _entries(path: str) -> list[Any]:
    local = Path(local_path(path, TOOLS)).expanduser()
    if not local.is_file():
        raise ConfigError(f"{TOOLS}: {path} does not exist")
    try:
        read = OmegaConf.to_container(OmegaConf.load(local), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{TOOLS}: {path} cannot be read: {error}") from error
    entries = read.get("tools") if isinstance(read, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{TOOLS}: {path} must hold a list under the key 'tools'")
    return entries


def _tools_of(entry: Any, file: Path, where: str) -> list[BaseTool]:
    known = ("class_name", "config", "tool_schema", "mcp")
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} must be a mapping with the keys {', '.join(known)}")
    for key in entry:
        if key not in known:
            raise ConfigError(f"{where}.{key} is unknown; there are {', '.join(known)}")
    config = entry.get("config")
    kind = config.get("type") if isinstance(config, Mapping) else None
    if kind not in ("native", "mcp"):
        raise ConfigError(f"{where}.config.type={kind!r} must be native or mcp")
    assert isinstance(config, Mapping)
    cls = _tool_class(entry.get("class_name"), f"{where}.class_name")
    if kind == "mcp":
        # The one file that needs the library `mcp`.
        from caldera.tools.mcp import mcp_tools

        return mcp_tools(cls, config, entry.get("mcp"), file.parent, f"{where}.mcp")
    if "mcp" in entry:
        raise ConfigError(f"{where}.mcp needs config.type=mcp, got {kind!r}")
    given = entry.get("tool_schema")
    schema = (
        None
        if given is None
        else OpenAIFunctionToolSchema.model_validate(given, f"{where}.tool_schema")
    )
    try:
        return [cls(config, schema)]
    except ConfigError as error:
        raise type(error)(f"{where}: {error}") from error


def _tool_class(name: Any, where: str) -> type[BaseTool]:
    """`pkg.mod.MyTool`, `file.py:MyTool`, or the name of a shipped one, also under verl's path."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}={name!r} must name a class, {OWN}")
    module, _, cls = name.rpartition(".")
    ours = OF_VERL.get(cls, cls)
    if ours in SHIPPED and (not module or module.startswith("verl.")):
        name = f"caldera.tools.{SHIPPED[ours]}.{ours}"
    elif not module:
        raise ConfigError(
            f"{where}={name!r} is none of the shipped tools: {', '.join(SHIPPED)}; a custom one is "
            f"named {OWN}"
        )
    kind = load_class(name, BaseTool, where)  # type: ignore[type-abstract]
    if inspect.isabstract(kind):
        raise ConfigError(f"{where}={name}: it has no execute")
    return kind
