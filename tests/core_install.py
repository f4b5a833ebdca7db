"""Run a module, or code, as where no extra is installed.

    python tests/core_install.py MODULE ARGUMENT ...
    python tests/core_install.py -c CODE

Packages that neither Caldera nor what it requires asks for cannot be imported.
"""

from __future__ import annotations

import importlib.metadata
import runpy
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def core_distributions() -> set[str]:
    """Caldera and all that it requires without extras."""
    found: set[str] = set()
    left = ["caldera"]
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        found.add(name)
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another platform or Python
            continue
        for requirement in map(Requirement, required):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(requirement.name)
    return found


def other_packages() -> set[str]:
    """The importable names of all other distributions."""
    core = core_distributions()
    return {
        package
        for package, owners in importlib.metadata.packages_distributions().items()
        if not core & {canonicalize_name(owner) for owner in owners}
    }


def leave_out(absent: set[str]) -> None:
    """Have these packages not be found, as if they were not installed."""
    for loaded in set(sys.modules):
        if loaded.partition(".")[0] in absent:
            del sys.modules[loaded]
    find = PathFinder.find_spec

    def find_others(fullname: str, *arguments: Any) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in absent else find(fullname, *arguments)

    PathFinder.find_spec = staticmethod(find_others)  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    leave_out(other_packages())
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-c":
        exec(sys.argv[1])
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
