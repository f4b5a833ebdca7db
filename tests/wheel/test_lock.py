"""uv.lock: in step with pyproject.toml and constraints.txt, and the same for everybody."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections import defaultdict
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "uv.lock"


def test_it_is_in_step_with_the_project() -> None:
    command = ["uv", "lock", "--check", "--offline", "--project", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"`make lock` writes it anew\n{done.stderr}"


def test_its_versions_are_those_that_are_tested() -> None:
    """Where a Python does not take one, an older version stands beside it."""
    pins = re.findall(r"^([^#\s]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    locked: dict[str, set[str]] = defaultdict(set)
    for package in tomllib.loads(LOCK.read_text())["package"]:
        locked[package["name"]].add(package["version"])
    tested = {str(canonicalize_name(name)): version for name, version in pins}
    both = locked.keys() & tested.keys()
    assert {"torch", "transformers", "ray", "datasets"} <= both
    assert {name: locked[name] for name in both if tested[name] not in locked[name]} == {}


def test_its_files_come_from_the_public_index() -> None:
    hosts = set(re.findall(r"https?://([^/\"]+)", LOCK.read_text()))
    assert hosts == {"files.pythonhosted.org", "pypi.org"}
