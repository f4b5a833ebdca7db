"""Line coverage of each package under src/caldera, held to a floor.

Usage: python scripts/report_coverage.py [REPOSITORY]

Reads what `make coverage` measured. Prints the files, the statements and the part of them that ran,
by package, and exits with status 1 where the total is below `fail_under` of [tool.coverage.report]
in pyproject.toml. `.venv/bin/coverage report --show-missing` names the lines.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from coverage import Coverage

PACKAGE = Path("src") / "caldera"


@dataclass
class Measured:
    """The files of a package together."""

    files: int = 0
    statements: int = 0
    missing: int = 0

    def add(self, statements: int, missing: int) -> None:
        self.files += 1
        self.statements += statements
        self.missing += missing

    @property
    def percent(self) -> float:
        return 100 * (1 - self.missing / self.statements) if self.statements else 100.0

    def row(self, name: str) -> str:
        return f"{self.files:7} {self.statements:10} {self.percent:6.1f}%  {name}"


def main(arguments: list[str]) -> int:
    root = (Path(arguments[0]) if arguments else Path(__file__).parent.parent).resolve()
    coverage = Coverage(data_file=root / ".coverage", config_file=str(root / "pyproject.toml"))
    coverage.load()
    packages: dict[str, Measured] = {}
    total = Measured()
    for path in sorted(coverage.get_data().measured_files()):
        _, statements, _, missing, _ = coverage.analysis2(path)
        package, *below = Path(path).relative_to(root / PACKAGE).parts
        for one in (packages.setdefault(package if below else "(no package)", Measured()), total):
            one.add(len(statements), len(missing))
    floor = float(str(coverage.get_option("report:fail_under")))
    print(f"line coverage of {PACKAGE}\n  files statements covered  package")
    for name, measured in sorted(packages.items()):
        print(measured.row(name))
    print(total.row(f"total, of at least {floor:g}%"))
    if total.percent < floor:
        print(f"the coverage is {total.percent:.2f}%, below the floor of {floor:g}%")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
