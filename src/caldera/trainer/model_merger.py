"""`python3 -m caldera.trainer.model_merger`: verl's module name for `caldera merge`."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("caldera.commands.merge", run_name="__main__", alter_sys=True)
