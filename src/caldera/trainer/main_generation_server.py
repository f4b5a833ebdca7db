"""`python3 -m caldera.trainer.main_generation_server`: `caldera generate` with keys of training."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("caldera.commands.generation_server", run_name="__main__", alter_sys=True)
