"""The command line of supervised training, whatever its objective."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from caldera.config import SFTTrainerConfig, load_supervised_config
from caldera.trainer.entry import ConfigCommand, leave_to_rank_0, run_entry_point


@dataclass(frozen=True, kw_only=True)
class SupervisedCommand(ConfigCommand[SFTTrainerConfig]):
    """`key=value ...` for one objective, which is named so that torch is imported late."""

    objective: str
    """`module:NAME`."""
    overrides: tuple[str, ...] = ()
    """What this command always says."""
    takes_torchrun: bool = True

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run; returns the exit status."""
        asked = self.read(argv)
        if _is_served_by_another():
            leave_to_rank_0()
            return 0 if asked.only_tells else run_entry_point(_serve)  # telling is for rank 0
        return self.run(asked, self.load, self._train)

    def load(
        self, overrides: Sequence[str], config_name: str, config_path: str | None
    ) -> SFTTrainerConfig:
        """The config, with what this command always says and every value checked."""
        given = [*self.overrides, *overrides]
        return load_supervised_config(given, config_name, config_path, self.schema)

    def _train(self, config: SFTTrainerConfig) -> None:
        from caldera.trainer.running import tell_end
        from caldera.trainer.sft.setup import run  # torch and transformers take seconds to import

        module, _, name = self.objective.partition(":")
        run(config, getattr(importlib.import_module(module), name))
        tell_end(config)


def _is_served_by_another() -> bool:
    """Whether this is a process of torchrun's that another one gives its work to."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"


def _serve() -> None:
    from caldera.trainer.sft.setup import serve_torchrun

    serve_torchrun()
