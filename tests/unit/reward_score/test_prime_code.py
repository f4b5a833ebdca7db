"""Code problems, run by a plain local runner instead of a sandbox."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from caldera.errors import DataError, RewardError
from caldera.reward_score import Program, ProgramResult, default_compute_score
from caldera.reward_score.code_tests import same_output, same_value
from caldera.reward_score.prime_code import compute_score, extract_code

MBPP = Path(__file__).parents[2] / "data" / "raw" / "mbpp" / "mbpp.jsonl"
SQUARES = {"inputs": [f"{i}\n" for i in range(12)], "outputs": [f"{i * i}\n" for i in range(12)]}
END = "--- the end ---"
SOLVED = {"score": 1.0, "acc": 1.0}


class LocalRunner:
    """Runs trusted programs, lazily, and counts them; asserts run in the program's own process."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, programs: Sequence[Program]) -> Iterator[ProgramResult]:
        for program in programs:
            self.runs += 1
            source = f"{program.source}\n{program.asserts}\nprint({END!r})"
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", source],
                input=program.stdin,
                capture_output=True,
                text=True,
                timeout=30,
            )
            output, reached_end, _ = done.stdout.rpartition(END)
            yield ProgramResult(output, bool(reached_end) and done.returncode == 0)


@pytest.fixture
def run_tests() -> LocalRunner:
    return LocalRunner()


def fenced(code: str) -> str:
    return f"This should do:\n```python\n{code}\n```\nI hope."


def test_reference_solutions_pass_their_own_tests(run_tests: LocalRunner) -> None:
    rows = [json.loads(line) for line in MBPP.read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 10
    for row in rows:
        cases = [f"{row['test_setup_code']}\n{test}" for test in row["test_list"]]
        truth = json.dumps({"assert_case": cases})
        assert default_compute_score("mbpp", fenced(row["code"]), truth, run_tests=run_tests) == (
            SOLVED
        ), row["task_id"]


def test_another_problems_solution_passes_nothing(run_tests: LocalRunner) -> None:
    rows = [json.loads(line) for line in MBPP.read_text(encoding="utf-8").splitlines()][:4]
    for row, other in itertools.pairwise(rows):
        truth = {"assert_case": row["test_list"]}
        assert compute_score(fenced(other["code"]), truth, run_tests)["score"] == 0.0


@pytest.mark.parametrize(
    ("code", "score", "runs"),
    [
        ("print(int(input()) ** 2)", 1.0, 12),
        # Wrong from 7 on: found at the eighth test, and two more of the first ten are run.
        ("n = int(input())\nprint(n * n if n < 7 else 0)", 0.7, 10),
        # Wrong at 3 alone.
        ("n = int(input())\nprint(n * n if n != 3 else 0)", 0.9, 10),
        ("print(int(input()) * 2)", 0.2, 10),
        ("this is no Python", 0.0, 10),
        ("print(1 / 0)", 0.0, 10),
        ("import sys; sys.exit(3)", 0.0, 10),
        ("", 0.0, 10),
    ],
)
def test_partial_credit(code: str, score: float, runs: int, run_tests: LocalRunner) -> None:
    result = compute_score(fenced(code), SQUARES, run_tests)
    assert result == {"score": score, "acc": float(score == 1.0)}
    assert run_tests.runs == runs


def test_a_failure_after_the_tenth_test_is_not_solved(run_tests: LocalRunner) -> None:
    code = fenced("n = int(input())\nprint(n * n if n != 11 else 0)")
    assert compute_score(code, SQUARES, run_tests) == {"score": 1.0, "acc": 0.0}
    assert compute_score(code, SQUARES, run_tests, continuous=False) == {"score": 0.0, "acc": 0.0}


def test_functions_are_called(run_tests: LocalRunner) -> None:
    def score(code: str, given: Any, wanted: Any) -> float:
        truth = {"inputs": [given], "outputs": [wanted], "fn_name": "f"}
        result: float = compute_score(fenced(code), json.dumps(truth), run_tests)["score"]
        return result

    add = "def f(a, b):\n    print('adding')\n    return a + b"
    assert score(add, [1, 2], 3) == 1.0
    assert score(add, [1, 2], [3]) == 1.0, "some data sets put the value in a list"
    assert score(add, "1\n2", "3") == 1.0, "and some write JSON"
    assert score(add, '"a"\n"b"', "ab") == 1.0, "or plain text"
    assert score(add, [[1], [2]], [1, 2]) == 1.0
    assert score(add, [0.1, 0.2], 0.3) == 1.0
    assert score(add, [1, 2], 4) == 0.0
    assert score(add, [1], 1) == 0.0
    assert score("class Solution:\n    def f(self, a):\n        return a, a", 5, [5, 5]) == 1.0
    assert score("def g(a):\n    return a", [5], 5) == 0.0
    assert score("def f(a):\n    return {1}", [5], 5) == 0.0, "JSON has no sets"


def test_a_program_that_ends_before_the_assert_fails_it(run_tests: LocalRunner) -> None:
    truth = {"assert_case": ["assert f() == 1"]}
    assert compute_score("import sys\nsys.exit(0)", truth, run_tests)["score"] == 0.0
    assert compute_score("def f():\n    return 1", truth, run_tests)["score"] == 1.0


@pytest.mark.parametrize(
    ("printed", "wanted", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2 \n\n3", "1 2\n3\n", True),
        ("1 2 3", "1 2\n3", False),
        ("0.3333333", "0.33333333", True),
        ("0.33", "0.33333333", False),
        ("3", "3.0", True),
        ("3.0", "3", False),
        ("10000000000000001", "10000000000000000", False),
        ("nan", "1.0", False),
        ("YES", "yes", False),
        ("x", "1.5", False),
        ("", "\n", True),
        ("", "1", False),
    ],
)
def test_outputs_are_compared_word_by_word(printed: str, wanted: str, same: bool) -> None:
    assert same_output(printed, wanted) == same


@pytest.mark.parametrize(
    ("result", "expected", "same"),
    [
        ([1, [2.0000000001]], [1, [2.0]], True),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"b": 1}, False),
        (True, 1, False),
        (True, 1.0, False),
        (1, 1.0, True),
        (1.0, 1, False),
        (10**400, 1.0, False),
        ([1], [1, 2], False),
        (None, None, True),
        ("1", 1, False),
    ],
)
def test_results_are_compared_with_their_types(result: Any, expected: Any, same: bool) -> None:
    assert same_value(result, expected) == same


@pytest.mark.parametrize(
    ("solution", "code"),
    [
        ("```python\na\n```", "a"),
        ("```py\na\n```\n```\nb\n```", "b"),
        ("```Python\na\n```\n```text\nb\n```", "a"),
        ("```python\na\n\n  b\n```", "a\n\n  b"),
        ("```python\na", "a"),
        ("a", "a"),
        ("```text\nb\n```", "```text\nb\n```"),
        ("", ""),
    ],
)
def test_extract_code(solution: str, code: str) -> None:
    assert extract_code(solution) == code


@pytest.mark.parametrize(
    ("truth", "why"),
    [
        ("{", "no JSON"),
        ("[]", "no dict"),
        (None, "no dict"),
        ({}, "no tests"),
        ({"inputs": [], "outputs": []}, "no tests"),
        ({"assert_case": []}, "no tests"),
        ({"assert_case": "assert f()"}, "no tests"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "2 inputs have 1 outputs"),
    ],
)
def test_a_bad_problem_is_told(truth: Any, why: str, run_tests: LocalRunner) -> None:
    with pytest.raises(DataError, match=why):
        compute_score("print(1)", truth, run_tests)


@pytest.mark.parametrize("data_source", ["codecontests", "apps", "codeforces", "taco"])
def test_code_needs_a_sandbox(data_source: str) -> None:
    with pytest.raises(RewardError, match="sandbox"):
        default_compute_score(data_source, "print(1)", SQUARES)


def test_an_int_that_no_float_holds_is_a_wrong_result() -> None:
    assert not same_value(10**400, 1.5)
