"""Asking an interpreter, this one or another, which libraries it can import."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SECONDS_TO_IMPORT = 300.0
QUESTION = """
import importlib, importlib.metadata, json, sys
answer = {}
for name, module in json.loads(sys.argv[1]).items():
    try:
        answer[name] = [importlib.metadata.version(name), None]
    except importlib.metadata.PackageNotFoundError:
        continue
    try:
        importlib.import_module(module)
    except BaseException as error:
        first = (str(error).splitlines() or [""])[0]
        answer[name][1] = type(error).__name__ + ": " + first
print()
print(json.dumps({"python": sys.version.split()[0], "found": answer}))
"""
"""It is run in a process of its own: a library may end the process that imports it."""


@dataclass(frozen=True)
class Library:
    """A library that is installed."""

    version: str
    problem: str | None
    """Why it cannot be imported; None: it can."""


@dataclass(frozen=True)
class Answer:
    """What an interpreter said of itself, or why it said nothing."""

    python: str = ""
    libraries: Mapping[str, Library] | None = None
    problem: str | None = None


def ask(python: Path | str, modules: Mapping[str, str]) -> Answer:
    """The libraries that an interpreter has, of those that are named: distribution -> module."""
    command = [str(python), "-W", "ignore", "-c", QUESTION, json.dumps(dict(modules))]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_IMPORT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Answer(problem=str(error))
    if said.returncode != 0:
        words = (said.stderr.splitlines() or ["no word"])[-1]
        return Answer(problem=f"it ended with status {said.returncode}: {words}")
    told = json.loads(said.stdout.rstrip().splitlines()[-1])
    found = {name: Library(*given) for name, given in told["found"].items()}
    return Answer(told["python"], found)


def ask_each(python: Path | str, modules: Mapping[str, str]) -> dict[str, Library]:
    """The same; where they cannot all be imported in one process, one by one."""
    together = ask(python, modules)
    if together.libraries is not None:
        return dict(together.libraries)
    found: dict[str, Library] = {}
    for name, module in modules.items():
        alone = ask(python, {name: module})
        if alone.libraries is None:
            found[name] = Library("installed", alone.problem)
        else:
            found |= alone.libraries
    return found
