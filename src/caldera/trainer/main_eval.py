"""`python3 -m caldera.trainer.main_eval`: verl's module name for `caldera eval`."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("caldera.commands.eval", run_name="__main__", alter_sys=True)
