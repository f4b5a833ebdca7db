"""Modules that are made of the table, when they are imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from verl._names import ALL_OF, ENTRY_POINTS, NAMES

RUN = """\
if __name__ == "__main__":
    import sys
    from verl._finder import resolve
    sys.exit(resolve({target!r})())
"""


def resolve(target: str) -> Any:
    """What `module:name.name` names, or the module of a target without a name."""
    module, _, names = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    return found


def install() -> None:
    """Have Python ask here for modules that are no files."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())


class Finder(MetaPathFinder):
    """Finds the modules of the table, and the packages above them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_package = any(name.startswith(f"{fullname}.") for name in NAMES)
        if fullname not in NAMES and not is_package:
            return None
        return ModuleSpec(fullname, Loader(), origin="verl._names", is_package=is_package)


class Loader(InspectLoader):
    """Makes a module whose names are looked up when somebody asks for them."""

    def exec_module(self, module: ModuleType) -> None:
        names = NAMES.get(module.__name__, {})
        source = names.get(ALL_OF)

        def look_up(name: str) -> Any:
            if name == "__all__":
                public = getattr(resolve(source), "__all__", ()) if source else ()
                return sorted({*names, *public} - {ALL_OF})
            if name in names:
                return resolve(names[name])
            if source is not None and not name.startswith("_"):
                return getattr(resolve(source), name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__dict__["__getattr__"] = look_up
        module.__dict__["__dir__"] = lambda: look_up("__all__")

    def get_code(self, fullname: str) -> CodeType:
        """What `python3 -m` runs."""
        target = ENTRY_POINTS.get(fullname)
        source = RUN.format(target=target) if target else ""
        return compile(source, f"<{fullname}>", "exec")

    def get_source(self, fullname: str) -> None:
        """There is none."""
