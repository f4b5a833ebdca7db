"""How a data source finds its scorer."""

from __future__ import annotations

from typing import Any

import pytest

from caldera.errors import ConfigError, RegistryError
from caldera.registry import Registry
from caldera.reward_score import default_compute_score, register_scorer, routing


@pytest.fixture
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> Registry[routing.Scorer]:
    registry: Registry[routing.Scorer] = Registry("scorer for the data source")
    monkeypatch.setattr(routing, "SCORERS", registry)
    return registry


def returns(score: float) -> routing.Scorer:
    return lambda solution_str, ground_truth, **options: score


def test_an_unknown_data_source_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as raised:
        default_compute_score("openai/gms8k", "#### 7", "7")
    message = str(raised.value)
    assert "'openai/gms8k'; did you mean 'openai/gsm8k'?" in message
    known = message.partition("known: ")[2].partition(")")[0].split(", ")
    assert {"caldera/arithmetic", "openai/gsm8k", "aime*", "searchR1_nq"} <= set(known)
    assert "custom_reward_function.path" in message


def test_names_win_over_patterns_and_long_patterns_over_short_ones(
    empty_registry: Registry[routing.Scorer],
) -> None:
    register_scorer("aime*")(returns(1.0))
    register_scorer("aime2025", "amc")(returns(2.0))
    register_scorer("aime20*")(returns(3.0))
    assert default_compute_score("aime", "", "") == 1.0
    assert default_compute_score("aime2025", "", "") == 2.0
    assert default_compute_score("amc", "", "") == 2.0
    assert default_compute_score("aime2024", "", "") == 3.0
    with pytest.raises(ConfigError, match="AIME2024"):
        default_compute_score("AIME2024", "", "")


def test_two_scorers_cannot_serve_one_data_source(
    empty_registry: Registry[routing.Scorer],
) -> None:
    register_scorer("math")(returns(1.0))
    with pytest.raises(RegistryError, match="'math' is registered already"):
        register_scorer("math")(returns(2.0))


def test_options_reach_the_scorer(empty_registry: Registry[routing.Scorer]) -> None:
    @register_scorer("echo")
    def echo(solution_str: str, ground_truth: Any, **options: Any) -> dict[str, Any]:
        return {"score": 0.0, "solution": solution_str, "truth": ground_truth} | options

    result = default_compute_score("echo", "a", "b", extra_info={"index": 3}, weight=2)
    assert result == {"score": 0.0, "solution": "a", "truth": "b", "weight": 2}


def test_the_sandbox_reaches_only_those_who_run_programs(
    empty_registry: Registry[routing.Scorer],
) -> None:
    @register_scorer("code")
    def runs_programs(solution_str: str, ground_truth: Any, run_tests: Any) -> dict[str, Any]:
        return {"score": 0.0, "run_tests": run_tests}

    @register_scorer("text")
    def reads_text(solution_str: str, ground_truth: Any, **options: Any) -> dict[str, Any]:
        return {"score": 0.0} | options

    runner: Any = list  # of programs, where it is never called
    assert default_compute_score("code", "", "", run_tests=runner) == {
        "score": 0.0,
        "run_tests": runner,
    }
    assert default_compute_score("text", "", "", run_tests=runner) == {"score": 0.0}
