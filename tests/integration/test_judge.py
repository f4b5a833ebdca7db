"""Answers that try to pass tests without solving them, before the judge of a real sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from caldera.data.prepare.preparer import HubTable, Source
from caldera.data.prepare.programming import humaneval_row, mbpp_row
from caldera.sandbox import Limits, Sandbox

CODE = Path(__file__).parents[1] / "data/code"
LIMITS = Limits(wall_seconds=20.0, memory_mb=128, output_bytes=2**18)
SQUARE = "assert square(3) == 9\nassert square(4) == 16\n"
ALL_SQUARES = "assert all(map(lambda n: square(n) == n * n, range(9)))\n"
NEGATIVE_IS_REFUSED = "try:\n    root(-1)\nexcept Exception:\n    pass\nelse:\n    assert False\n"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(LIMITS, slots=2) as sandbox:
        yield sandbox


def cases_of(name: str) -> Iterator[tuple[str, str, list[str]]]:
    """Task, reference solution and test cases, as prepared data has them."""
    for line in (CODE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        raw = json.loads(line)
        for split in ("train", "validation", "test"):
            source = Source(split, name, HubTable(name, None, split), name)
            row = humaneval_row(raw, source) if name == "humaneval" else mbpp_row(raw, source)
            if row is not None:
                break
        else:
            continue
        cases = json.loads(row["reward_model"]["ground_truth"])["assert_case"]
        yield str(raw["task_id"]), row["extra_info"]["answer"], cases


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_reference_solutions_pass_and_empty_ones_do_not(name: str, sandbox: Sandbox) -> None:
    tasks = list(cases_of(name))
    assert len(tasks) >= 20
    for task, solution, cases in tasks:
        for case in cases:
            outcome = sandbox.check(solution, case)
            assert outcome.ok, (task, outcome)
            assert not sandbox.check("", case).ok, task


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "tests",
    [
        "assert pow(2, 3) == 8",
        "assert str(sum([1, 2])) == '3'",
        "assert sorted([2, 1]) == [1, 2]",
        "def check(candidate):\n    assert candidate([1, 2]) == 2\ncheck(max)",
    ],
)
def test_a_builtin_is_no_answer(tests: str, sandbox: Sandbox) -> None:
    for answer in ("", "def other():\n    return 1\n"):
        outcome = sandbox.check(answer, tests)
        assert not outcome.ok and "the program defines no" in str(outcome.raised)


def test_a_function_may_have_the_name_of_a_builtin_or_a_module(sandbox: Sandbox) -> None:
    program = (
        "def sum(a, b):\n    return a + b\n"
        "def bisect(values, value):\n    return values.index(value)\n"
    )
    assert sandbox.check(program, "assert sum(10, 15) == 25").ok
    assert not sandbox.check(program, "assert sum(10, 15) == 26").ok
    assert sandbox.check(program, "assert bisect([4, 5], 5) == 1").ok


@pytest.mark.parametrize(
    ("task", "forgery"),
    [
        ("HumanEval/32", "def poly(xs, x):\n    return 0.0\ndef find_zero(xs):\n    return 0.0\n"),
        (
            "HumanEval/38",
            "def encode_cyclic(s):\n    return s\ndef decode_cyclic(s):\n    return s",
        ),
        (
            "HumanEval/50",
            "def encode_shift(s):\n    return s\ndef decode_shift(s):\n    return s\n",
        ),
    ],
)
def test_helpers_of_the_prompt_are_not_the_answers(
    task: str, forgery: str, sandbox: Sandbox
) -> None:
    ((solution, cases),) = [rest for name, *rest in cases_of("humaneval") if name == task]
    assert sandbox.check(str(solution), cases[0]).ok
    assert not sandbox.check(forgery, cases[0]).ok
    assert not sandbox.check(f"{solution}\n{forgery}", cases[0]).ok


def test_tests_that_ask_for_nothing_pass_nobody(sandbox: Sandbox) -> None:
    never_called = "def check(candidate):\n    assert candidate(3) == 9\n"
    for tests in ("", "assert True", never_called):
        assert not sandbox.check("def square(x):\n    return x * x\n", tests).ok


UNIT_TESTS = (
    "import unittest\n"
    "class Tests(unittest.TestCase):\n"
    "    def test_it(self):\n        self.assertEqual(square(3), 9)\n"
)


@pytest.mark.parametrize(
    "end", ["unittest.main()\n", "if __name__ == '__main__':\n    unittest.main()\n"]
)
def test_a_suite_of_unittest_is_run(end: str, sandbox: Sandbox) -> None:
    """It ends by an exit."""
    assert sandbox.check("def square(x):\n    return x * x\n", UNIT_TESTS + end).ok
    for answer in ("", "def square(x):\n    return 8\n", "def square(x):\n    raise SystemExit\n"):
        assert not sandbox.check(answer, UNIT_TESTS + end).ok


def test_tests_that_exit_before_they_ask_pass_nobody(sandbox: Sandbox) -> None:
    for tests in ("raise SystemExit\n", "import sys\nsys.exit(0)\n", "exit()\n", "quit()\n"):
        assert not sandbox.check("def square(x):\n    return 9\n", f"{tests}{SQUARE}").ok
    asks = "assert square(3) == 9\nraise SystemExit({})\n"
    for status, passes in (("", True), ("0", True), ("False", True), ("1", False), ("'no'", False)):
        outcome = sandbox.check("def square(x):\n    return 9\n", asks.format(status))
        assert outcome.ok == passes, status


def test_objects_of_the_program_keep_what_tests_give_them(sandbox: Sandbox) -> None:
    program = (
        "class Node:\n    def __init__(self, value):\n        self.value, self.next = value, None\n"
        "    def total(self):\n"
        "        return self.value + (self.next.total() if self.next else 0)\n"
    )
    tests = (
        "first = Node(1)\nfirst.next = Node(2)\nfirst.next.next = Node(3)\n"
        "assert first.total() == 6\nassert first.next.value == 2\n"
    )
    assert sandbox.check(program, tests).ok
    assert not sandbox.check(program, f"{tests}assert first.total() == 7\n").ok


# ---------------------------------------------------------------------- exceptions


@pytest.mark.parametrize(
    "raised",
    [
        "StopIteration", "StopAsyncIteration", "GeneratorExit", "SystemExit(0)",
        "KeyboardInterrupt", "type('StopIteration', (Exception,), {})",
    ],
)  # fmt: skip
def test_an_exception_does_not_end_the_tests_early(raised: str, sandbox: Sandbox) -> None:
    program = f"def square(x):\n    raise {raised}\n"
    for tests in (SQUARE, ALL_SQUARES, "assert [*iter(lambda: square(1), 0)] == []"):
        assert not sandbox.check(program, tests).ok


def test_an_expected_exception_is_the_programs_own(sandbox: Sandbox) -> None:
    raising = "def root(x):\n    if x < 0:\n        raise ValueError\n    return x ** 0.5\n"
    assert sandbox.check(raising, NEGATIVE_IS_REFUSED).ok
    for answer in (
        "",
        "this is no Python",
        "import os\nos._exit(0)\n",
        "def root(x):\n    import os\n    os._exit(0)\n",
    ):
        assert not sandbox.check(answer, NEGATIVE_IS_REFUSED).ok


# ---------------------------------------------------------------------- forged values and exits

EQUAL = (
    "    __eq__ = __ne__ = __lt__ = __ge__ = __contains__ = lambda *_: True\n    __hash__ = None\n"
)
WRONG = "def square(x):\n    return 0\n"
ATTACKS = {
    "object": f"class Right:\n{EQUAL}def square(x):\n    return Right()\n",
    "metaclass": f"class Kind(type):\n{EQUAL}class Right(metaclass=Kind):\n    pass\n"
    "def square(x):\n    return Right\n",
    **{
        kind: f"class Right({kind}):\n{EQUAL}def square(x):\n    return Right()\n"
        for kind in ("int", "float", "str", "list", "tuple", "dict", "bytes", "complex")
    },
    "builtins": "import builtins\nfor name in ('all', 'map', 'range', 'AssertionError', 'exec'):\n"
    f"    setattr(builtins, name, lambda *_: True)\n{WRONG}",
    "modules": "import sys, types\nfor name in ('math', 'json', 'builtins', 'ast', 'symtable'):\n"
    f"    sys.modules[name] = types.ModuleType(name)\n{WRONG}",
    "exits": f"import os\n{WRONG}os._exit(0)\n",
    "exits when asked": "import os\ndef square(x):\n    os._exit(0)\n",
    "exits in a thread": "import os, threading\n"
    f"threading.Thread(target=os._exit, args=(0,)).start()\n{WRONG}",
    "exits at the end": "import atexit, os\natexit.register(os._exit, 0)\n"
    f"{WRONG}raise SystemExit\n",
    "prints": "def square(x):\n    print('ok', '----- caldera: result -----', 9, sep='\\n')\n",
    "prints a lot": f"print('9\\n' * 10**6)\n{WRONG}",
    "answers a lot": "def square(x):\n    return [9] * 10**9\n",
    "dunder name": "__name__ = 'tests'\n__builtins__ = {}\nsquare = None\n",
    "replies by itself": "import os\nfor end in range(3, 9):\n    try:\n"
    "        os.write(end, b'{\"value\": true}\\n' * 99)\n"
    f"    except OSError:\n        pass\n{WRONG}",
    "finds the tests": "import gc, sys\ndef square(x):\n    texts = [o for o in gc.get_objects()\n"
    "        if isinstance(o, dict) and 'tests' in o]\n    return 9 if texts else 0\n",
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_but_the_right_value_passes(name: str, sandbox: Sandbox) -> None:
    for tests in (SQUARE, ALL_SQUARES):
        assert not sandbox.check(ATTACKS[name], tests).ok
    assert sandbox.check("def square(x):\n    return x * x\n", SQUARE + ALL_SQUARES).ok
