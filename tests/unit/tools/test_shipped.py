from __future__ import annotations

import asyncio
from typing import Any

import pytest

from caldera.errors import ConfigError
from caldera.sandbox import Outcome
from caldera.tools import programs
from caldera.tools.calculator import CalculatorTool, calculate
from caldera.tools.formats import FunctionCall
from caldera.tools.gsm8k import Gsm8kTool
from caldera.tools.programs import NOTHING_PRINTED, PythonTool, SandboxFusionTool
from caldera.tools.running import ToolRunner, ToolState

NATIVE = {"type": "native"}


def run(tool: Any, arguments: Any, state: Any = None) -> Any:
    runner = ToolRunner([tool])
    call = FunctionCall(tool.name, arguments)
    return asyncio.run(runner.run([call], state or ToolState()))[0]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * -5", -35),
        ("7 / 2", 3.5),
        ("1,200 // 7 % 5", 1),
        ("2^10", 1024),
        ("1e3 - .5", 999.5),
    ],
)
def test_arithmetic(expression: str, value: float) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("1 +", "no arithmetic expression"),
        ("(" * 500, "no arithmetic expression"),
        ("__import__('os')", "cannot be calculated"),
        ("True + 1", "cannot be calculated"),
        ("1 < 2", "cannot be calculated"),
        ("1 / 0", "has no value"),
        ("9 ** 9 ** 9", "too large"),
        ("10. ** 400", "has no value"),
        ("(-8) ** 0.5", "not a real number"),
        ("9999999999 ** 100 * 9999999999 ** 100", "the result is too large"),
        ("1" * 1001, "more than 1000 characters"),
    ],
)
def test_what_cannot_be_calculated_is_told(expression: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        calculate(expression)


def test_the_calculator_shows_numbers_as_people_write_them() -> None:
    tool = CalculatorTool(NATIVE)
    assert run(tool, '{"expression": "0.1 + 0.2"}').text == "0.3"
    assert run(tool, '{"expression": "6 * 7"}').text == "42"
    failed = run(tool, '{"expression": "1 / 0"}')
    assert failed.status == "error" and "division by zero" in failed.text


def test_gsm8k_rewards_an_answer_that_is_better_than_those_before() -> None:
    tool = Gsm8kTool(NATIVE)
    row = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}}
    state = ToolState(tools_kwargs=row)
    outcomes = [run(tool, f'{{"answer": {answer}}}', state) for answer in (71, 72, '"#### 72"')]
    assert [outcome.reward for outcome in outcomes] == [-0.05, 0.0, -0.05]
    assert outcomes[0].text == "Current parsed answer='71' reward=0.0"
    assert outcomes[1].text == "Current parsed answer='72' reward=1.0"
    another = ToolState(tools_kwargs=row)
    assert run(tool, '{"answer": "72"}', another).reward == 0.0
    assert tool._instances == {}
    assert "ground_truth" in run(tool, '{"answer": "72"}').text


class Programs:
    """Stands for a sandbox, and keeps what it was asked for."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.asked: list[Any] = []

    def run(self, program: Any, limits: Any) -> Any:
        self.asked.append((program, limits.wall_seconds, limits.memory_mb))
        return self.outcome


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Outcome("ok", "1\n"), "1\n"),
        (Outcome("ok"), NOTHING_PRINTED),
        (Outcome("failed", "1\n", "NameError"), "1\nNameError"),
        (Outcome("timed out", "1\n"), "1\n\nThe program was ended: timed out"),
    ],
)
def test_what_a_program_printed_is_shown(
    outcome: Any, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = PythonTool({**NATIVE, "default_timeout": 3})
    sandbox = Programs(outcome)
    monkeypatch.setattr(programs, "_sandbox", lambda: sandbox)
    shown = run(tool, '{"code": "print(1)"}')
    assert (shown.text, shown.status) == (text, "ok")
    assert shown.metrics == {"status": outcome.status}
    assert sandbox.asked == [("print(1)", 3, 512)]


def test_sandbox_fusion_is_asked_at_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://localhost:1/run_code"
    tool = SandboxFusionTool({**NATIVE, "sandbox_fusion_url": url, "memory_limit_mb": 64})
    servers = {url: Programs(Outcome("ok", "1"))}
    monkeypatch.setattr(programs, "_client", servers.__getitem__)
    assert run(tool, '{"code": "x"}').text == "1"
    assert servers[url].asked == [("x", 30.0, 64)]
    assert (tool.limits.num_workers, tool.limits.rate_limit) == (10, 10)
    free = {**NATIVE, "sandbox_fusion_url": url, "enable_global_rate_limit": False}
    assert SandboxFusionTool(free).limits.rate_limit is None


@pytest.mark.parametrize(
    ("make", "config", "told"),
    [
        (SandboxFusionTool, {}, "sandbox_fusion_url"),
        (SandboxFusionTool, {"sandbox_fusion_url": "nowhere"}, "sandbox_fusion_url='nowhere'"),
        (
            SandboxFusionTool,
            {"sandbox_fusion_url": "http://a", "default_language": "c"},
            "default_language='c'",
        ),
        (SandboxFusionTool, {"sandbox_fusion_url": 5}, "sandbox_fusion_url=5"),
        (
            SandboxFusionTool,
            {"sandbox_fusion_url": "http://a", "enable_global_rate_limit": "no"},
            "enable_global_rate_limit='no'",
        ),
        (PythonTool, {"default_timout": 1}, "did you mean 'default_timeout'"),
        (PythonTool, {"default_timeout": "ten"}, "default_timeout='ten' must be a number above 0"),
        (PythonTool, {"memory_limit_mb": 0.5}, "memory_limit_mb=0.5 must be an integer above 0"),
        (CalculatorTool, {"digits": 1}, "config.digits"),
        (Gsm8kTool, {"digits": 1}, "config.digits"),
    ],
)
def test_mistakes_in_their_config_are_named(make: Any, config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make(NATIVE | config)
