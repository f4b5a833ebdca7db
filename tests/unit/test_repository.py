"""Rules that the repository as a whole keeps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONAL_LIBRARIES = {
    "datasets",
    "gguf",
    "math_verify",
    "megatron",
    "peft",
    "ray",
    "sglang",
    "vllm",
    "wandb",
}


def python_output(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nothing_is_too_big() -> None:
    assert "too big" not in python_output("scripts/report_sizes.py")


def test_every_folder_with_python_files_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "src/caldera").rglob("*.py")}
    assert folders, "the package has no Python files"
    assert sorted(str(f) for f in folders if not (f / "__init__.py").is_file()) == []


def test_the_changelog_has_an_unreleased_section_on_top() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    sections = [line for line in lines if line.startswith("## ")]
    assert sections[0] == "## [Unreleased]"


def test_decisions_are_numbered_named_after_their_title_and_have_a_status() -> None:
    folder = ROOT / "docs/adr"
    index = (folder / "README.md").read_text(encoding="utf-8")
    pages = sorted(folder.glob("[0-9]*.md"))
    for number, page in enumerate(pages, start=1):
        heading, blank, status, *_ = page.read_text(encoding="utf-8").splitlines()
        title = heading.removeprefix(f"# {number}. ")
        words = re.findall("[a-z0-9]+", title.lower().replace("'", ""))
        assert page.name == "-".join([f"{number:04d}", *words]) + ".md"
        assert blank == "" and re.match("Status: (accepted|superseded by)", status), page.name
        assert f"| {number} | [{title}]({page.name}) |" in index


def test_a_decision_names_its_status_in_the_index() -> None:
    """As the page does, with the numbers of the decisions that amend it."""
    folder = ROOT / "docs/adr"
    rows = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    listed = {row.split("|")[1].strip(): row.split("|")[3].strip() for row in rows if "](0" in row}
    for page in folder.glob("[0-9]*.md"):
        status = page.read_text(encoding="utf-8").split("\n\n")[1].removeprefix("Status: ")
        plain = re.sub(r"\[(\d+)\]\([^)]*\)", r"\1", " ".join(status.split()))
        assert listed[str(int(page.name[:4]))] == plain, page.name


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_layers_of_a_page_are_those_of_the_linter(page: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    words = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert f"``` {' -> '.join(layers)} ```" in words


def test_the_architecture_page_lists_every_room() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    rooms = {name.rstrip("/") for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    package = ROOT / "src/caldera"
    found = {path.name for path in package.iterdir() if not path.name.startswith("_")}
    assert rooms == found - {"py.typed"}


def test_import_caldera_imports_no_optional_library() -> None:
    code = "import caldera, json, sys; caldera.DataProto; print(json.dumps(sorted(sys.modules)))"
    imported = {name.partition(".")[0] for name in json.loads(python_output("-c", code))}
    assert "torch" in imported, "the list of imported modules is not what this test expects"
    assert imported & OPTIONAL_LIBRARIES == set()


def test_the_command_line_shows_its_keys_without_waiting_for_torch() -> None:
    code = (
        "import sys; from caldera.trainer.main_ppo import main; "
        "main(['--help', 'algorithm.gamma']); print('torch' in sys.modules)"
    )
    assert python_output("-c", code).splitlines()[-1] == "False"
