"""Tools that run programs, in the sandbox of this machine and on a server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from caldera.sandbox import Limits, Sandbox, fusion
from caldera.sandbox.server import SandboxServer
from caldera.tools.base import BaseTool
from caldera.tools.formats import FunctionCall
from caldera.tools.loading import load_tools
from caldera.tools.running import ToolOutcome, ToolRunner, ToolState

CASES = {
    "print(6 * 7)": "42\n",
    "x = 1": "no stdout here",
    "while True: pass": "The program was ended: timed out",
}


def tools(folder: Path, *entries: tuple[str, dict[str, object]]) -> list[BaseTool]:
    (folder / "tools.yaml").write_text(
        json.dumps(
            {
                "tools": [
                    {"class_name": name, "config": {"type": "native", **config}}
                    for name, config in entries
                ]
            }
        )
    )
    return load_tools(str(folder / "tools.yaml"))


def check(tool: BaseTool) -> None:
    runner = ToolRunner([tool], max_parallel_calls=8)
    programs = [*CASES, "print(undefined)"]
    calls = [FunctionCall(tool.name, json.dumps({"code": program})) for program in programs]
    *outcomes, failed = asyncio.run(runner.run(calls, ToolState()))
    assert [outcome.text for outcome in outcomes] == list(CASES.values())
    assert "NameError: name 'undefined' is not defined" in failed.text
    assert [outcome.status for outcome in [*outcomes, failed]] == ["ok"] * 4
    assert [outcome.metrics["status"] for outcome in outcomes] == ["ok", "ok", "timed out"]


def test_python_runs_in_the_sandbox(tmp_path: Path) -> None:
    (tool,) = tools(tmp_path, ("PythonTool", {"default_timeout": 1.0}))
    check(tool)


def test_sandbox_fusion_runs_on_a_server(tmp_path: Path) -> None:
    with (
        Sandbox(Limits(wall_seconds=5)) as sandbox,
        SandboxServer(sandbox, "127.0.0.1", 0) as server,
    ):
        config = {"sandbox_fusion_url": f"{server.url}/run_code", "default_timeout": 1.0}
        (tool,) = tools(tmp_path, ("verl.tools.sandbox_fusion_tools.SandboxFusionTool", config))
        check(tool)


def test_a_program_that_forks_without_end_is_an_outcome(tmp_path: Path) -> None:
    def outcome_of(code: str, seconds: float) -> ToolOutcome:
        (tool,) = tools(tmp_path, ("PythonTool", {"default_timeout": seconds}))
        runner = ToolRunner([tool], max_response_length=10_000)
        call = FunctionCall(tool.name, json.dumps({"code": code}))
        (outcome,) = asyncio.run(runner.run([call], ToolState()))
        return outcome

    forked = outcome_of("import os\nwhile True: os.fork()", 2.0)
    assert forked.status == "ok" and forked.metrics["status"] != "ok"
    assert "Error" in forked.text or "was ended" in forked.text
    assert outcome_of("print(6 * 7)", 10.0).text == "42\n", "the next program runs as ever"


def test_a_server_that_is_down_is_told_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "FIRST_PAUSE_SECONDS", 0.001)
    (tool,) = tools(
        tmp_path, ("SandboxFusionTool", {"sandbox_fusion_url": "http://127.0.0.1:9/run_code"})
    )
    call = FunctionCall(tool.name, '{"code": "print(1)"}')
    (outcome,) = asyncio.run(ToolRunner([tool]).run([call], ToolState()))
    assert outcome.status == "error" and "no answer from http://127.0.0.1:9" in outcome.text
