"""The command that installs an extra, for each way in which Caldera can be installed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from caldera import installation
from caldera.installation import Commit, checkout, commit, install_command, version_line

ROOT = Path(__file__).parents[2]
Installed = Callable[[str | None], None]
INSTALLS = re.compile(r"(?<!cd )\binstall(?: --?[\w-]+)* '?caldera\b|'caldera\[|\"caldera\[")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Caldera lies in site-packages; pip was given the URL, or a name."""
    monkeypatch.setattr(installation, "SOURCES", tmp_path / "site-packages")
    told = tmp_path / "site-packages" / "caldera-0.1.0.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: caldera\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(str(told.parent))

    def make(url: str | None) -> None:
        if url is not None:
            (told / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {}}))

    return make


def test_a_checkout_that_is_on_the_path() -> None:
    assert checkout() == ROOT
    assert install_command("lora") == (
        f"cd {shlex.quote(str(ROOT))} && pip install -c constraints.txt -e '.[lora]'"
    )


def test_installed_from_a_checkout(installed: Installed, tmp_path: Path) -> None:
    folder = tmp_path / "my checkout"
    folder.mkdir()
    installed(folder.as_uri())
    assert install_command() == "pip install caldera"  # it is no longer there
    (folder / "constraints.txt").write_text("")
    assert install_command() == f"cd '{folder}' && pip install -c constraints.txt -e ."
    assert install_command("lora").endswith(" && pip install -c constraints.txt -e '.[lora]'")


@pytest.mark.parametrize(
    "url", [None, "https://example.org/caldera.git", "file:///wheels/caldera-0.1.0.whl"]
)
def test_installed_from_elsewhere(installed: Installed, url: str | None) -> None:
    installed(url)
    assert checkout() is None
    assert install_command("lora") == "pip install 'caldera[lora]'"


def test_no_message_has_a_command_of_its_own() -> None:
    package = ROOT / "src/caldera"
    own = {
        path.relative_to(package)
        for path in package.rglob("*.py")
        if INSTALLS.search(path.read_text()) and path.name != "installation.py"
    }
    assert not own


def test_the_guides_install_what_is_in_the_checkout() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert not [page.name for page in pages if INSTALLS.search(page.read_text())]
    assert not [page.name for page in pages if "`caldera[" in page.read_text()]


def test_every_extra_that_is_asked_for_exists() -> None:
    asked = re.compile(r"install_command\(['\"](\w+)['\"]\)")
    extras = (ROOT / "pyproject.toml").read_text().partition("optional-dependencies")[2]
    found = {
        name
        for path in (ROOT / "src/caldera").rglob("*.py")
        for name in asked.findall(path.read_text())
    }
    assert {"mcp", "lora", "math"} <= found
    assert not [name for name in found if f"\n{name} = [" not in extras]


def test_python_started_beside_a_clone_imports_the_package(tmp_path: Path) -> None:
    (tmp_path / "caldera").symlink_to(ROOT)  # as `git clone` leaves it
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", "import caldera; print(caldera.__file__)"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()).name == "__init__.py"


# ---------------------------------------------------------------------- the commit


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=name", "-c", "user.email=name@example.org")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of one commit, in which Caldera lies."""
    source = tmp_path / "src/caldera/installation.py"
    source.parent.mkdir(parents=True)
    source.write_text("")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    monkeypatch.setattr(installation, "SOURCES", tmp_path)
    monkeypatch.setattr(installation, "BUILT_FROM", source.with_name("commit.txt"))
    return tmp_path


def test_the_commit_of_a_checkout(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    (repository / "notes.txt").write_text("not part of the package")
    assert commit() == Commit(head, is_changed=False)
    assert version_line("0.1.0") == f"0.1.0 ({head[:10]})"
    (repository / "src/caldera/installation.py").write_text("changed")
    assert commit() == Commit(head, is_changed=True)
    assert version_line("0.1.0") == f"0.1.0 ({head[:10]}-dirty)"


@pytest.mark.parametrize("is_changed", [False, True])
def test_the_commit_that_a_build_noted(repository: Path, is_changed: bool) -> None:
    noted = Commit("0123456789abcdef", is_changed)
    (repository / "src/caldera/commit.txt").write_text(f"{noted}\n")
    assert commit() == noted


def test_the_commit_of_a_repository_around_an_installation_is_not_caldera_s(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "SOURCES", repository / "src")
    assert commit() is None
    assert version_line("0.1.0") == "0.1.0 (commit unknown)"


def test_no_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(repository))
    assert commit() is None


def test_a_repository_that_git_cannot_read(repository: Path) -> None:
    (repository / ".git/HEAD").write_text("not a reference")
    assert commit() is None


def test_the_build_reads_the_commit_from_this_file_alone() -> None:
    """setup.py runs it where nothing is installed."""
    program = (
        f"import runpy; names = runpy.run_path({installation.__file__!r}); print(names['commit']())"
    )
    command = [sys.executable, "-I", "-S", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(commit())
