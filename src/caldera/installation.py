"""How this Caldera was installed: its commit, and the command that installs an extra of it.

setup.py runs this file by itself, so it imports nothing of Caldera.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

SOURCES = Path(__file__).parents[2]
"""In a checkout, the repository: the package is in its folder `src`."""
CONSTRAINTS = "constraints.txt"
BUILT_FROM = Path(__file__).with_name("commit.txt")
"""Written into wheels and sdists by setup.py; a checkout has none."""
CHANGED = "-dirty"
GIT_S = 10.0


class Commit(NamedTuple):
    """A commit of Caldera's repository."""

    hash: str
    is_changed: bool
    """Whether the code differs from the commit's."""

    def __str__(self) -> str:
        return self.hash + (CHANGED if self.is_changed else "")


def commit() -> Commit | None:
    """The commit of this code, from git in a checkout or as its build noted it; None: unknown."""
    if BUILT_FROM.is_file():
        noted = BUILT_FROM.read_text(encoding="ascii").strip()
        return Commit(noted.removesuffix(CHANGED), noted.endswith(CHANGED))
    if not (SOURCES / ".git").exists():  # another repository may be around an installation
        return None
    head = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--", "src")
    return None if head is None or changes is None else Commit(head, bool(changes))


def version_line(version: str) -> str:
    """Version and commit: `0.1.0 (0123456789)`."""
    found = commit()
    shown = "commit unknown" if found is None else str(found._replace(hash=found.hash[:10]))
    return f"{version} ({shown})"


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(SOURCES), "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def install_command(extra: str | None = None) -> str:
    """The shell command that installs Caldera's dependencies, or those of an extra.

    None of the commands upgrades Caldera by its bare name: an index may have another package of
    that name.
    """
    extras = f"[{extra}]" if extra else ""
    folder = checkout()
    if folder is None:
        return f"pip install {shlex.quote(f'caldera{extras}')}"
    here = shlex.quote(f".{extras}")
    return f"cd {shlex.quote(str(folder))} && pip install -c {CONSTRAINTS} -e {here}"


def checkout() -> Path | None:
    """The checkout that Caldera runs from or was installed from; None: there is none."""
    for folder in (SOURCES, _installed_from()):
        if folder is not None and (folder / CONSTRAINTS).is_file():
            return folder
    return None


def _installed_from() -> Path | None:
    """The folder that pip was given."""
    try:
        told = distribution("caldera").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    url = urlsplit(json.loads(told)["url"]) if told else None
    return Path(url2pathname(url.path)) if url and url.scheme == "file" else None
