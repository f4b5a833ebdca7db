"""The report of sizes: what it counts, what it names, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "report_sizes.py"


def report(repository: Path, source: str) -> tuple[int, list[str]]:
    """The script's status and output for a repository whose only file has this source."""
    (repository / "src").mkdir()
    (repository / "src" / "module.py").write_text(source)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(repository)], capture_output=True, text=True
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def nested(openings: list[str]) -> str:
    """A function in which each opening stands inside the one before it."""
    lines = ["def nest(x):"]
    lines += [f"{'    ' * (depth + 1)}{opening}" for depth, opening in enumerate(openings)]
    return "\n".join([*lines, f"{'    ' * (len(openings) + 1)}pass", ""])


def test_a_long_file_is_shown_and_nothing_more(tmp_path: Path) -> None:
    status, lines = report(tmp_path, "x = 1\n" * 5000)
    assert (status, lines[0]) == (0, "src: 1 files, 5000 lines")
    assert "  5000 src/module.py" in lines


@pytest.mark.parametrize(
    ("statements", "status", "named"),
    [(59, 0, []), (60, 0, ["61 lines, 0 deep"]), (120, 1, ["121 lines, 0 deep  <- too big"])],
)
def test_long_functions(tmp_path: Path, statements: int, status: int, named: list[str]) -> None:
    source = "\n\nasync def long():\n" + "    x = 1\n" * statements
    found, lines = report(tmp_path, source)
    assert found == status
    shown = [line for line in lines if " has " in line]
    assert shown == [f"  src/module.py:3: long has {text}" for text in named]


@pytest.mark.parametrize("innermost", ["if x:", "for y in x:", "while x:", "with x:"])
def test_deep_nesting_is_named_and_deeper_is_refused(tmp_path: Path, innermost: str) -> None:
    openings = ["if x:", "for y in x:", "while y:", "with y:", innermost]
    status, lines = report(tmp_path, nested(openings))
    assert (status, lines[-1]) == (0, "  src/module.py:1: nest has 7 lines, 5 deep")
    (tmp_path / "deeper").mkdir()
    status, lines = report(tmp_path / "deeper", nested([*openings, "if x:"]))
    assert (status, lines[-1]) == (1, "  src/module.py:1: nest has 8 lines, 6 deep  <- too big")


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
    assert "4 deep:" in report(tmp_path, source)[1][-1]


def test_elif_does_not_nest_but_if_under_else_does(tmp_path: Path) -> None:
    elifs = "".join(f"    elif x == {i}:\n        pass\n" for i in range(9))
    buried = nested(["if x:", "if x:", "if x:"]) + " " * 12 + "else:\n" + " " * 16 + "if x:\n"
    buried += " " * 20 + "if x:\n" + " " * 24 + "pass\n"
    source = f"def flat(x):\n    if x:\n        pass\n{elifs}\n\n{buried}"
    shown = [line for line in report(tmp_path, source)[1] if " has " in line]
    assert len(shown) == 1
    assert "nest has" in shown[0]
    assert shown[0].endswith("5 deep")


def test_an_inner_function_is_measured_by_itself(tmp_path: Path) -> None:
    source = nested(["if x:", "if x:", "if x:", "def inner():", "if x:"])
    assert "4 deep:" in report(tmp_path, source)[1][-1]
