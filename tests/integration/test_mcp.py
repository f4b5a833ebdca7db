"""Tools of real MCP servers, over standard input and output and over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from caldera.errors import ConfigError
from caldera.tools.formats import FunctionCall
from caldera.tools.loading import load_tools
from caldera.tools.running import ToolOutcome, ToolRunner, ToolState
from tests.generation_trials import free_port

SERVER = Path(__file__).parents[1] / "data/mcp/server.py"
STDIO = {"command": sys.executable, "args": [str(SERVER)], "type": "stdio"}

NO_TOOLS = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        server = {"name": "tests", "version": "1"}
        said = {"protocolVersion": version, "capabilities": {}, "serverInfo": server}
        answer = {"result": said}
    elif "id" in asked:
        answer = {"error": {"code": -32601, "message": "Method not found"}}
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""


@contextmanager
def served(port: int) -> Iterator[str]:
    """The address of a server over HTTP."""
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(free_port()) as url:
        yield url


def written(folder: Path, server: Any, tools: Any, **limits: Any) -> str:
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"tests": server}}))
    entry = {
        "class_name": "verl.tools.mcp_search_tool.MCPSearchTool",
        "config": {"type": "mcp", **limits},
        "mcp": {"mcp_servers_config_path": "./servers.json", "tool_selected_list": tools},
    }
    (folder / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    return str(folder / "tools.yaml")


def run(runner: ToolRunner, *calls: tuple[str, dict[str, Any]]) -> list[ToolOutcome]:
    given = [FunctionCall(name, json.dumps(arguments)) for name, arguments in calls]
    return asyncio.run(runner.run(given, ToolState()))


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_tools_of_a_server_are_called(tmp_path: Path, transport: str, address: str) -> None:
    server = STDIO if transport == "stdio" else {"url": address}
    tools = load_tools(written(tmp_path, server, ["add", "wait", "fail"], timeout=10))
    assert [tool.name for tool in tools] == ["add", "wait", "fail"]
    runner = ToolRunner(tools, max_parallel_calls=8)
    try:
        shown = runner.schemas(["add"])[0]["function"]
        assert shown["description"] == "Adds two numbers."
        assert shown["parameters"]["required"] == ["a"]
        assert shown["parameters"]["properties"]["b"]["type"] == "integer"
        calls: list[tuple[str, dict[str, Any]]] = [
            ("add", {"a": 20, "b": 22}), ("add", {"a": 1}), ("wait", {"seconds": 0.01})
        ]  # fmt: skip
        for _ in range(2):  # event loops come and go, the connection stays
            assert [outcome.text for outcome in run(runner, *calls)] == ["42", "2", "waited"]
        failed, malformed = run(runner, ("fail", {}), ("add", {"b": 1}))
        assert failed.status == "error" and "nothing there" in failed.text
        assert malformed.status == "malformed" and "add also needs a" in malformed.text
    finally:
        asyncio.run(runner.close())


def test_headers_are_sent(tmp_path: Path, address: str) -> None:
    server = {"url": address, "headers": {"X-Name": "someone"}}
    runner = ToolRunner(load_tools(written(tmp_path, server, ["who"])))
    try:
        assert run(runner, ("who", {}))[0].text == "someone"
    finally:
        asyncio.run(runner.close())


def test_a_slow_call_is_given_up_and_others_go_on(tmp_path: Path) -> None:
    runner = ToolRunner(load_tools(written(tmp_path, STDIO, None, timeout=0.5)))
    try:
        assert run(runner, ("wait", {"seconds": 600}))[0].status == "timeout"
        assert run(runner, ("add", {"a": 1}))[0].text == "2"
    finally:
        asyncio.run(runner.close())


def test_a_server_that_died_is_started_again(tmp_path: Path) -> None:
    runner = ToolRunner(load_tools(written(tmp_path, STDIO, ["add", "die"])))
    try:
        died = run(runner, ("die", {}))[0]
        assert died.status == "error" and "the server tests is gone" in died.text
        assert run(runner, ("add", {"a": 1}))[0].text == "2"
    finally:
        asyncio.run(runner.close())


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_a_refused_request_is_an_outcome(tmp_path: Path, transport: str, address: str) -> None:
    """The connection stays: it is everybody's."""
    server = STDIO if transport == "stdio" else {"url": address}
    tools = load_tools(written(tmp_path, server, ["refuse", "wait"], timeout=20))
    runner = ToolRunner(tools, max_parallel_calls=3)
    messages = ["not like this", *["Session terminated"] * (transport == "stdio")]
    try:
        calls = [("refuse", {"message": message}) for message in messages]
        *refused, waited = run(runner, *calls, ("wait", {"seconds": 0.5}))
        assert [outcome.text for outcome in refused] == [
            f"Error when executing tool: {message}" for message in messages
        ]
        assert waited.text == "waited"
    finally:
        asyncio.run(runner.close())


def test_a_server_at_an_address_may_come_back(tmp_path: Path) -> None:
    port = free_port()
    with served(port) as url:
        runner = ToolRunner(load_tools(written(tmp_path, {"url": url}, ["add"], timeout=20)))
        assert run(runner, ("add", {"a": 1}))[0].text == "2"
    try:
        assert run(runner, ("add", {"a": 1}))[0].status in ("error", "timeout")
        with served(port):
            outcomes = [run(runner, ("add", {"a": 1}))[0] for _ in range(2)]
            assert outcomes[1].text == "2", outcomes
    finally:
        asyncio.run(runner.close())


def test_those_who_find_a_dead_server_at_once_start_one(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    code = f"open({str(starts)!r}, 'a').write('x'); import runpy; runpy.run_path({str(SERVER)!r})"
    server = {"command": sys.executable, "args": ["-c", code]}
    path = written(tmp_path, server, ["add", "die"], attempts=2)
    runner = ToolRunner(load_tools(path), max_parallel_calls=65)
    try:
        calls: list[tuple[str, dict[str, Any]]] = [("die", {})]
        calls += [("add", {"a": n}) for n in range(64)]
        outcomes = run(runner, *calls)
        assert outcomes[0].status == "error"
        assert {outcome.status for outcome in outcomes[1:]} <= {"ok", "error"}
        before = len(starts.read_text())
        assert before <= 1 + 2, "one for each time that the call to `die` was tried, and no more"
        assert [outcome.text for outcome in run(runner, *calls[1:])] == [
            str(n + 1) for n in range(64)
        ]
        assert len(starts.read_text()) <= before + 1
    finally:
        asyncio.run(runner.close())


@pytest.mark.parametrize(
    ("server", "tools", "told"),
    [
        (STDIO, ["subtract"], "names 'subtract'; the servers have add, wait, fail, who, die"),
        ({"command": "no-such-program"}, None, "mcpServers.tests: .*cannot be connected to"),
        ({"command": sys.executable, "args": ["-c", ""]}, None, "cannot be connected to"),
        ({"url": "http://127.0.0.1:9/mcp"}, None, "cannot be connected to"),
        ({"url": "http://127.0.0.1:9/mcp", "args": []}, None, "mcpServers.tests.args is unknown"),
        ({"url": "http://127.0.0.1:9/sse", "type": "sse"}, None, "tests.type='sse'"),
        ({}, None, "either a 'command' or a 'url'"),
        (STDIO, [], "tool_selected_list=.* must be a list of names"),
        (STDIO, "add", "tool_selected_list='add' must be a list of names"),
        ({"command": sys.executable, "args": ["-c", NO_TOOLS]}, None, "does not list its tools"),
    ],
)
def test_mistakes_are_named_before_the_run_starts(
    tmp_path: Path, server: Any, tools: Any, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        load_tools(written(tmp_path, server, tools))


def test_a_server_that_says_nothing_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caldera.tools.mcp.SECONDS_TO_CONNECT", 1.0)
    started = tmp_path / "started"
    code = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    silent = {"command": sys.executable, "args": ["-c", code]}
    with pytest.raises(ConfigError, match=r"mcpServers\.tests: no response in 1 s"):
        load_tools(written(tmp_path, silent, None))
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
