"""The report of coverage: what it counts by package, and the floor it holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "report_coverage.py"
HALF_RUN = """
def once():
    return 1

def never():
    return 2

once()
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One package of which 4 of 5 statements run, another of which none of 2 do."""
    package = tmp_path / "src" / "caldera"
    for name, source in (("half", HALF_RUN), ("unused", "x = 1\ny = 2\n")):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text(source)
    (package / "__init__.py").write_text("import caldera.half\n")
    return tmp_path


def report(repository: Path, floor: int) -> tuple[int, list[str]]:
    """The script's status and output, after a run that imports `caldera`."""
    settings = ("[tool.coverage.run]", 'source = ["src/caldera"]', "[tool.coverage.report]")
    (repository / "pyproject.toml").write_text("\n".join([*settings, f"fail_under = {floor}"]))
    (repository / "main.py").write_text("import sys; sys.path[0] = 'src'; import caldera")
    subprocess.run([sys.executable, "-m", "coverage", "run", "main.py"], cwd=repository, check=True)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(repository)], capture_output=True, text=True
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_every_package_is_counted_with_what_never_ran(repository: Path) -> None:
    status, lines = report(repository, floor=60)
    assert status == 0
    assert [line.split() for line in lines[2:]] == [
        ["1", "1", "100.0%", "(no", "package)"],
        ["1", "5", "80.0%", "half"],
        ["1", "2", "0.0%", "unused"],
        ["3", "8", "62.5%", "total,", "of", "at", "least", "60%"],
    ]


def test_less_than_the_floor_fails(repository: Path) -> None:
    status, lines = report(repository, floor=63)
    assert (status, lines[-1]) == (1, "the coverage is 62.50%, below the floor of 63%")
