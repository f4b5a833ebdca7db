"""Notes the commit in what is built; all else about the package is in pyproject.toml."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

INSTALLATION = runpy.run_path(str(Path(__file__).with_name("src") / "caldera/installation.py"))


def note_commit(package: Path) -> None:
    """`caldera --version` reads it there."""
    commit = INSTALLATION["commit"]()
    if commit is not None:
        (package / INSTALLATION["BUILT_FROM"].name).write_text(f"{commit}\n", encoding="ascii")


class BuildWithCommit(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # the package stays in the checkout, which git knows
            note_commit(Path(self.build_lib) / "caldera")


class SdistWithCommit(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        note_commit(Path(base_dir) / "src/caldera")


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit})
