"""The size gate itself: what it counts, and what it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_size.py"


def offences(repository: Path, source: str) -> list[str]:
    """The script's output for a repository whose only file has this source."""
    (repository / "src").mkdir()
    (repository / "src" / "module.py").write_text(source)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(repository)], capture_output=True, text=True
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert done.returncode == (1 if lines else 0)
    return lines


def nested(openings: list[str]) -> str:
    """A function in which each opening stands inside the one before it."""
    lines = ["def nest(x):"]
    lines += [f"{'    ' * (depth + 1)}{opening}" for depth, opening in enumerate(openings)]
    return "\n".join([*lines, f"{'    ' * (len(openings) + 1)}pass", ""])


def test_a_file_may_have_400_lines(tmp_path: Path) -> None:
    assert offences(tmp_path, "x = 1\n" * 400) == []


def test_a_longer_file_is_named(tmp_path: Path) -> None:
    assert offences(tmp_path, "x = 1\n" * 401) == [
        "src/module.py:401: the file has 401 lines, at most 400"
    ]


@pytest.mark.parametrize(("statements", "found"), [(59, 0), (60, 1)])
def test_a_function_may_have_60_lines(tmp_path: Path, statements: int, found: int) -> None:
    source = "\n\nasync def long():\n" + "    x = 1\n" * statements
    expected = ["src/module.py:3: long has 61 lines, at most 60"]
    assert offences(tmp_path, source) == expected[:found]


def test_nesting_may_be_4_deep(tmp_path: Path) -> None:
    assert offences(tmp_path, nested(["if x:", "for y in x:", "while y:", "with y:"])) == []


@pytest.mark.parametrize("innermost", ["if x:", "for y in x:", "while x:", "with x:"])
def test_deeper_nesting_is_named(tmp_path: Path, innermost: str) -> None:
    source = nested(["if x:", "for y in x:", "while y:", "with y:", innermost])
    assert offences(tmp_path, source) == ["src/module.py:6: nest is nested 5 deep, at most 4"]


def test_try_and_match_are_nesting_but_their_branches_are_not(tmp_path: Path) -> None:
    source = """\
def nest(x):
    try:
        pass
    except ValueError:
        match x:
            case 1:
                if x:
                    for y in x:
                        pass
"""
    assert offences(tmp_path, source) == []


def test_elif_does_not_nest_but_if_under_else_does(tmp_path: Path) -> None:
    elifs = "".join(f"    elif x == {i}:\n        pass\n" for i in range(9))
    buried = nested(["if x:", "if x:", "if x:"]) + " " * 12 + "else:\n" + " " * 16 + "if x:\n"
    buried += " " * 20 + "if x:\n" + " " * 24 + "pass\n"
    source = f"def flat(x):\n    if x:\n        pass\n{elifs}\n\n{buried}"
    found = offences(tmp_path, source)
    assert len(found) == 1
    assert found[0].endswith("nest is nested 5 deep, at most 4")


def test_an_inner_function_is_measured_by_itself(tmp_path: Path) -> None:
    source = nested(["if x:", "if x:", "if x:", "def inner():", "if x:"])
    assert offences(tmp_path, source) == []
