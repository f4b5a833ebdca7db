"""`python3 -m caldera.trainer.main_generation`: verl's module name for `caldera generate`."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("caldera.commands.generate", run_name="__main__", alter_sys=True)
