"""Tests of a code problem, as programs to be run elsewhere and judged by what they print.

Problems come in three kinds:

    {"inputs": ["3\\n"], "outputs": ["9\\n"]}                     reads stdin, writes stdout
    {"inputs": [[3]], "outputs": [9], "fn_name": "square"}      a function, or method of Solution
    {"assert_case": ["assert square(3) == 9"]}                  asserts, each a test of its own
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caldera.errors import DataError

# Whatever the program prints before this line is its own.
RESULT_MARK = "----- caldera: result -----"
FLOAT_TOLERANCE = 1e-6

CALL_FUNCTION = """

import json as _json
_owner = Solution() if "Solution" in globals() else None
_function = getattr(_owner, {name!r}, None) or globals()[{name!r}]
_result = _json.dumps(_function(*_json.loads({arguments!r})))
print("\\n" + {mark!r} + "\\n" + _result)
"""


@dataclass(frozen=True)
class Program:
    """A Python program and what it reads."""

    source: str
    stdin: str = ""
    asserts: str = ""
    """Python that tests what the program defines. Apart from it, so that it can be run where the
    program cannot reach it."""


@dataclass(frozen=True)
class ProgramResult:
    stdout: str
    completed: bool
    """Whether it ended by itself, within its limits and with status 0, and its asserts, if it has
    any, were run to their end."""


RunTests = Callable[[Sequence[Program]], Iterable[ProgramResult]]
"""Runs programs, each in a fresh sandbox, and gives their results in order; may be lazy, since a
reader stops at the first test that fails."""


@dataclass(frozen=True)
class CodeTest:
    program: Program
    accepts: Callable[[str], bool]
    """Judges what the program wrote to stdout."""

    def passed(self, result: ProgramResult) -> bool:
        return result.completed and self.accepts(result.stdout)


def build_tests(code: str, ground_truth: Any) -> list[CodeTest]:
    """The tests of a problem for an answer's code; the ground truth is a dict, or one in JSON."""
    problem = read_problem(ground_truth)
    if "assert_case" in problem:
        tests = [assert_test(code, str(case)) for case in problem["assert_case"]]
    else:
        cases = zip(problem["inputs"], problem["outputs"], strict=True)
        name = problem.get("fn_name")
        if name:
            tests = [function_test(code, str(name), given, wanted) for given, wanted in cases]
        else:
            tests = [stdin_test(code, given, wanted) for given, wanted in cases]
    return tests


def read_problem(ground_truth: Any) -> Mapping[str, Any]:
    problem = ground_truth
    if isinstance(problem, str):
        try:
            problem = json.loads(problem)
        except ValueError as error:
            raise bad_problem(ground_truth, f"it is no JSON: {error}") from error
    if not isinstance(problem, Mapping):
        raise bad_problem(ground_truth, "it is no dict")
    names = ["assert_case"] if "assert_case" in problem else ["inputs", "outputs"]
    columns = [problem.get(name) for name in names]
    lengths = [len(column) if isinstance(column, list) else 0 for column in columns]
    if min(lengths) == 0:
        raise bad_problem(ground_truth, "it has no tests")
    if min(lengths) != max(lengths):
        raise bad_problem(ground_truth, f"{lengths[0]} inputs have {lengths[1]} outputs")
    return problem


def bad_problem(ground_truth: Any, why: str) -> DataError:
    shown = repr(ground_truth)[:200]
    return DataError(
        "the ground truth of a code problem must be a dict with inputs and outputs (and fn_name), "
        f"or with assert_case: {why}, got {shown}"
    )


def stdin_test(code: str, given: Any, wanted: Any) -> CodeTest:
    expected = as_text(wanted)
    return CodeTest(Program(code, as_text(given)), lambda stdout: same_output(stdout, expected))


def function_test(code: str, name: str, given: Any, wanted: Any) -> CodeTest:
    if isinstance(given, str):
        arguments = [read_value(line) for line in given.splitlines()]
    else:
        arguments = given if isinstance(given, list) else [given]
    expected = [wanted]
    if isinstance(wanted, str):
        expected.append(read_value(wanted))
    elif isinstance(wanted, list) and len(wanted) == 1:
        expected.append(wanted[0])
    call = CALL_FUNCTION.format(name=name, arguments=json.dumps(arguments), mark=RESULT_MARK)
    return CodeTest(Program(code + call), lambda stdout: has_result(stdout, expected))


def read_value(text: str) -> Any:
    """A value of a data set that writes its values as JSON, or the text of one that does not."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def assert_test(code: str, case: str) -> CodeTest:
    return CodeTest(Program(code, asserts=case), lambda stdout: True)


def as_text(lines: Any) -> str:
    """Some problems give their input or output as a list of lines."""
    return lines if isinstance(lines, str) else "\n".join(map(str, lines))


def same_output(stdout: str, expected: str) -> bool:
    """Whether two outputs have the same words on the same lines, blank lines aside."""
    printed, wanted = words_by_line(stdout), words_by_line(expected)
    return len(printed) == len(wanted) and all(map(same_words, printed, wanted))


def words_by_line(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.split())]


def same_words(printed: list[str], wanted: list[str]) -> bool:
    return len(printed) == len(wanted) and all(map(same_word, printed, wanted))


def same_word(printed: str, wanted: str) -> bool:
    """Whether two words are equal; a wanted number with a decimal point allows for rounding."""
    if printed == wanted:
        return True
    if "." not in wanted:
        return False
    try:
        return close(float(printed), float(wanted))
    except ValueError:
        return False


def has_result(stdout: str, expected: list[Any]) -> bool:
    """Whether a function's result, printed after the mark, is one of the expected values.

    There are several where a data set may have put its value in JSON or in a list of one.
    """
    _, mark, text = stdout.rpartition(f"\n{RESULT_MARK}\n")
    if not mark:
        return False
    try:
        result = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return any(same_value(result, value) for value in expected)


def same_value(result: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        same_length = isinstance(result, list) and len(result) == len(expected)
        return same_length and all(map(same_value, result, expected))
    if isinstance(expected, dict):
        same_keys = isinstance(result, dict) and result.keys() == expected.keys()
        return same_keys and all(same_value(result[key], expected[key]) for key in expected)
    if isinstance(expected, float) and type(result) in (int, float):
        return close(result, expected)
    return type(result) is type(expected) and bool(result == expected)


def close(number: float, expected: float) -> bool:
    try:
        return math.isclose(number, expected, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    except OverflowError:  # an integer beyond all floats
        return False
