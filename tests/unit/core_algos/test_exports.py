from __future__ import annotations

import importlib
import pkgutil

from caldera import core_algos


def test_the_package_exports_what_its_modules_do() -> None:
    exported: set[str] = set()
    for module in pkgutil.iter_modules(core_algos.__path__):
        exported |= set(importlib.import_module(f"caldera.core_algos.{module.name}").__all__)
    assert exported == set(core_algos.__all__)
