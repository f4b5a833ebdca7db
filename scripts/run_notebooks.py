"""Run a notebook from an empty folder, and write it with what it shows.

Usage: python scripts/run_notebooks.py NOTEBOOK OUT

OUT may be NOTEBOOK itself: so are those of examples/notebooks made. Warnings and log lines are left
out, for they name the machine.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

VERSION = 4
CELL_S = 900


def run(notebook: Path) -> Any:
    """The notebook, executed; raises what a cell raises."""
    read = nbformat.read(notebook, as_version=VERSION)
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        place = {"metadata": {"path": folder}}
        NotebookClient(read, timeout=CELL_S, kernel_name="python3", resources=place).execute()
    for cell in read.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not is_log(output)]
    read.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return read


def is_log(output: Any) -> bool:
    if output.output_type == "stream":
        return bool(output.name == "stderr")
    shown: str = output.get("data", {}).get("text/plain", "")
    return shown.startswith(("INFO ", "WARNING "))


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, out = map(Path, sys.argv[1:])
    nbformat.write(run(source), out, version=VERSION)


if __name__ == "__main__":
    main()
