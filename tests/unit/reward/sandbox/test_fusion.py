from __future__ import annotations

import pytest

from caldera.errors import RewardError
from caldera.sandbox import Limits, SandboxFusionClient
from caldera.sandbox.fusion import outcome_of, request_for, sandbox_error


def test_the_request_has_the_protocols_names() -> None:
    request = request_for("print(1)", "x", {"a": b"1"}, Limits(wall_seconds=3, memory_mb=100))
    assert request == {
        "code": "print(1)", "stdin": "x", "language": "python", "compile_timeout": 3,
        "run_timeout": 3, "memory_limit_MB": 100, "files": {"a": "MQ=="}, "fetch_files": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "run_status", "code", "expected"),
    [
        ("Success", "Finished", 0, "ok"),
        ("Failed", "Finished", 1, "failed"),
        ("Failed", "TimeLimitExceeded", None, "timed out"),
        ("Failed", "Error", None, "failed"),
        ("Failed", "Finished", 0, "failed"),
    ],
)
def test_answers_become_outcomes(
    status: str, run_status: str, code: int | None, expected: str
) -> None:
    result = {"status": run_status, "return_code": code, "stdout": None, "stderr": "e"}
    outcome = outcome_of({"status": status, "message": "", "run_result": result})
    assert (outcome.status, outcome.stdout, outcome.stderr) == (expected, "", "e")


@pytest.mark.parametrize("response", [{}, sandbox_error("full"), {"status": "Success"}])
def test_an_answer_about_nothing_is_an_error(response: dict[str, object]) -> None:
    with pytest.raises(RewardError, match="the sandbox server failed"):
        outcome_of(response)


@pytest.mark.parametrize(
    "odd", [{"stdout": 9}, {"stderr": ["x"]}, {"execution_time": "0.1"}, {"execution_time": [1]}]
)
def test_a_result_of_other_types_is_an_error(odd: dict[str, object]) -> None:
    with pytest.raises(RewardError, match="the sandbox server's result makes no sense"):
        outcome_of({"status": "Success", "run_result": {"return_code": 0, **odd}})


def test_no_program_ran_for_less_than_nothing() -> None:
    """It would lengthen the time limit of its scorer."""
    result = {"return_code": 0, "execution_time": -1e9}
    assert outcome_of({"status": "Success", "run_result": result}).seconds == 0.0


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/run_code"])
def test_the_path_may_be_left_out(url: str) -> None:
    assert SandboxFusionClient(url).url == "http://h:1/run_code"
    assert SandboxFusionClient("https://h/v2/run?k=1").url == "https://h/v2/run?k=1"
