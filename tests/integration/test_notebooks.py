"""The notebooks of examples/: they run, and show in the repository what they show when run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
FIRST_RUN = ROOT / "examples/notebooks/first_run.ipynb"
MOST_BYTES = 300_000
ACCURACIES = re.compile(r"right answers: (\d+)% before, (\d+)% after")


def cells(notebook: Path) -> list[dict[str, Any]]:
    read: dict[str, Any] = json.loads(notebook.read_text(encoding="utf-8"))
    return list(read["cells"])


def code(notebook: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in cells(notebook) if cell["cell_type"] == "code"]


def printed(notebook: Path) -> str:
    """All that cells have printed."""
    return "".join(
        "".join(output["text"])
        for cell in cells(notebook)
        for output in cell.get("outputs", ())
        if output["output_type"] == "stream"
    )


def test_the_first_run_is_there() -> None:
    assert FIRST_RUN in NOTEBOOKS


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_it_is_committed_as_it_was_run(notebook: Path) -> None:
    """From the first cell to the last, without paths of a machine, and with a picture."""
    text = notebook.read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    assert "image/svg+xml" in text, "GitHub shows no drawing that is part of HTML"
    assert not re.search(r"/(?:home|root|tmp|work|Users)/", text)
    counts = [cell["execution_count"] for cell in cells(notebook) if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_its_links_lead_somewhere(notebook: Path) -> None:
    for cell in cells(notebook):
        if cell["cell_type"] == "markdown":
            for target in re.findall(r"\]\((?!https?://)([^)#]+)", "".join(cell["source"])):
                assert (notebook.parent / target).exists(), target


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_first_run_learns(tmp_path: Path) -> None:
    out = tmp_path / "out.ipynb"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/run_notebooks.py", FIRST_RUN, out],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert code(out) == code(FIRST_RUN)
    for notebook in (FIRST_RUN, out):
        before, after = map(int, ACCURACIES.search(printed(notebook)).groups())
        assert 25 <= before <= 45 and after >= before + 25
